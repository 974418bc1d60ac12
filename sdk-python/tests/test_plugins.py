"""Plugins: their arguments, and shipped ones in worlds of real workers. The scripts in `workers/` assert."""

from __future__ import annotations

import os
import pathlib
from typing import Any, Callable

import numpy
import pytest

import ronde
from ronde.client import Client
from ronde.plugins import call_of


class Session:
    """A mock session that records the options of submissions."""

    rank, size, is_open = 0, 2, True

    def __init__(self) -> None:
        self.received: list[dict[str, Any]] = []

    def submit(self, *_: Any, **options: Any) -> None:
        self.received.append({name: options[name] for name in ("op", "plugin", "codec") if name in options})

    def submit_group(self, _: str, tensors: Any, **options: Any) -> list[None]:
        self.submit(**options)
        return [None for _ in tensors]

    def close(self) -> None:
        self.is_open = False


X = numpy.ones(4, numpy.float32)
TOPK = ronde.Plugin("topk", ratio=0.25)
MEDIAN = ronde.PluginOp("median")


def test_a_plugin_has_its_name_and_parameters() -> None:
    plugin = ronde.Plugin("a@1.0.0", ratio=numpy.float32(0.25), seed=numpy.int16(-3), exact=numpy.bool_(True), mode="x")
    name, parameters = call_of(plugin)
    assert name == plugin.name == "a@1.0.0"
    given = [("ratio", 0.25), ("seed", -3), ("exact", True), ("mode", "x")]
    assert parameters == given == list(plugin.parameters.items())
    assert [type(value) for _, value in parameters] == [float, int, bool, str]
    assert repr(TOPK) == "Plugin('topk', ratio=0.25)"


def test_equal_plugins_are_equal() -> None:
    assert {TOPK: 1}[ronde.Plugin("topk", ratio=0.25)] == 1
    assert ronde.Plugin("a", x=1, y=2) == ronde.Plugin("a", y=2, x=1)
    different = [TOPK, ronde.Plugin("topk"), ronde.PluginOp("topk", ratio=0.25), ronde.Plugin("topk", ratio=0.5)]
    different += [ronde.Plugin("a", x=1), ronde.Plugin("a", x=1.0), ronde.Plugin("a", x=True), ronde.Plugin("b", x=1)]
    assert len(set(different)) == len(different)
    assert MEDIAN not in (ronde.Average, ronde.Sum)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "ratio is nan, but must be finite"),
        (numpy.float64("inf"), "ratio is inf, but must be finite"),
        (1 << 63, "not within 64 bits"),
        (-(1 << 63) - 1, "not within 64 bits"),
        (None, "ratio is None, a NoneType; parameters are bool, int, float or str"),
        ([1], "a list; parameters are"),
        (1j, "a complex; parameters are"),
    ],
)
def test_invalid_parameter_values_are_rejected(value: Any, words: str) -> None:
    for kind in (ronde.Plugin, ronde.PluginOp):
        with pytest.raises(ValueError, match=words):
            kind("topk", ratio=value)


def test_a_plugins_name_is_a_str() -> None:
    with pytest.raises(ValueError, match="named by a str"):
        ronde.Plugin(3)  # type: ignore[arg-type]


def test_plugins_reach_the_session() -> None:
    session = Session()
    client = Client(session)  # type: ignore[arg-type]
    client.allreduce_async(X, ronde.Sum, codec=TOPK)
    client.allreduce_async(X, MEDIAN, out=X)
    client.grouped_allreduce_async([X, X], codec=TOPK)
    client.grouped_allreduce_async([X], MEDIAN)
    client.allreduce_async(X)
    topk: Any = ("topk", [("ratio", 0.25)])
    median: Any = ("median", [])
    assert session.received == [
        {"op": 1, "plugin": topk},
        {"op": 8, "plugin": median},
        {"op": 0, "plugin": topk},
        {"op": 8, "plugin": median},
        {"op": 0},
    ]


def test_codecs_and_reductions_are_not_interchangeable() -> None:
    session = Session()
    client = Client(session)  # type: ignore[arg-type]
    wrong: list[tuple[str, Callable[[], Any]]] = [
        (r"op=Plugin\('topk', ratio=0.25\) is a codec", lambda: client.allreduce(X, TOPK)),  # type: ignore[arg-type]
        (r"codec=PluginOp\('median'\) is a reduction", lambda: client.allreduce(X, codec=MEDIAN)),  # type: ignore[arg-type]
        ("leave the codec out", lambda: client.allreduce(X, MEDIAN, codec=TOPK)),
        ("leave the codec out", lambda: client.grouped_allreduce([X], MEDIAN, codec="float16")),
    ]
    for words, call in wrong:
        with pytest.raises(ValueError, match=words):
            call()
    assert session.received == []


def test_a_compression_by_plugin_leaves_tensors_alone() -> None:
    torch = pytest.importorskip("torch")
    import ronde.torch as hvd

    compression, gradient = hvd.Compression.plugin("topk", ratio=0.25), torch.ones(3, dtype=torch.float16)
    assert repr(compression) == "Compression.plugin('topk', ratio=0.25)"
    assert compression.codec == TOPK
    compressed, context = compression.compress(gradient)
    assert compressed is gradient
    assert compression.decompress(gradient, context) is gradient
    with pytest.raises(ValueError, match="must be finite"):
        hvd.Compression.plugin("topk", ratio=float("nan"))


def test_a_compression_by_plugin_is_for_sums() -> None:
    torch = pytest.importorskip("torch")
    import ronde.torch as hvd

    compression = hvd.Compression.plugin("topk")
    ones = torch.ones(3)
    for op in (hvd.Max, hvd.Adasum, hvd.PluginOp("median")):
        for call in (
            lambda op: hvd.allreduce(ones, op=op, compression=compression),
            lambda op: hvd.grouped_allreduce([ones], op=op, compression=compression),
        ):
            with pytest.raises(ValueError, match=r"Compression.plugin\('topk'\) is for op=Average and op=Sum"):
                call(op)
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        with pytest.raises(ValueError, match="is for op=Average and op=Sum"):
            hvd.DistributedOptimizer(optimizer, compression=compression, op=op)
    for scatter in (
        lambda: hvd.reducescatter(ones, compression=compression),
        lambda: hvd.grouped_reducescatter([ones], compression=compression),
    ):
        with pytest.raises(ValueError, match="reducescatter takes no plugin"):
            scatter()


@pytest.fixture
def plugins() -> None:
    """The shipped plugins of the tested build, in the folder that the sidecar searches."""
    binary = os.environ.get("RONDE_BIN")
    if binary and "RONDE_PLUGINS" not in os.environ:
        beside = pathlib.Path(binary).resolve().parent
        if not any((directory / "plugins").is_dir() for directory in (beside, beside.parent)):
            pytest.fail(f"there is no folder `plugins` beside {binary} or above it; build them first (`make plugins`)")


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 2), (3, 2)])
def test_plugins_encode_and_reduce(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("plugins.py", ranks, sidecars).count("plugins give the expected results") == ranks


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (3, 2)])
def test_wrong_plugins_raise_with_the_reason(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("plugin_errors.py", ranks, sidecars).count("wrong plugins raised with the reason") == ranks


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 2), (3, 2)])
def test_gradients_are_compressed_by_plugins(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    pytest.importorskip("torch")
    assert world("torch_plugins.py", ranks, sidecars).count("gradients go by plugins") == ranks
