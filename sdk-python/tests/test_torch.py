"""Logic of ronde.torch that needs no sidecar."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from typing import TYPE_CHECKING, Any, Callable

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

torch = pytest.importorskip("torch")

import ronde.torch as hvd  # noqa: E402
from ronde import without_launcher  # noqa: E402
from ronde.frameworks import basics, mpi, process_sets, window, world  # noqa: E402
from ronde.torch import optimizer_state  # noqa: E402


class AloneClient:
    """A client of a world of one: results are inputs."""

    rank, size, local_rank, local_size, cross_rank, cross_size = 0, 1, 0, 1, 0, 1
    is_homogeneous = True

    def broadcast_async(self, tensor: Any, *_: Any, out: Any = None, **__: Any) -> Any:
        return Done(tensor.clone() if out is None else out)


class Done:
    def __init__(self, result: Any) -> None:
        self.result = result

    def poll(self) -> bool:
        return True

    def wait(self) -> Any:
        return self.result


@pytest.fixture
def alone() -> Iterator[None]:
    world.begin(world.World(AloneClient(), is_dynamic=False))  # type: ignore[arg-type]
    process_sets.begin(None)
    yield
    world.end()


def test_nothing_works_before_init() -> None:
    assert not hvd.is_initialized()
    for call in (hvd.rank, hvd.size, hvd.barrier, lambda: hvd.allreduce(torch.ones(1))):
        with pytest.raises(ValueError, match=r"Horovod has not been initialized; use hvd\.init\(\)\."):
            call()
    hvd.shutdown()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"comm": "everybody"}, "Invalid type of argument comm"),
        ({"process_sets": "static"}, 'give a list of hvd.ProcessSet, or "dynamic"'),
        ({"process_sets": 3}, "give a list of hvd.ProcessSet"),
    ],
)
def test_wrong_arguments_of_init_connect_nothing(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        hvd.init(**options)
    assert not hvd.is_initialized()


def test_process_sets_before_init() -> None:
    some = hvd.ProcessSet([2, 0])
    assert str(some) == "ProcessSet(process_set_id=None, ranks=[0, 2], mpi_comm=None)"
    assert (some.size(), some.rank()) == (None, None)
    assert some != hvd.ProcessSet([2, 0])
    assert hvd.global_process_set.process_set_id == 0
    for wrong in (["a"], 3, [-1], None):
        with pytest.raises(ValueError, match="ranks, as integers from 0"):
            hvd.ProcessSet(wrong)


def test_build_flags() -> None:
    assert [ask() for ask in (hvd.mpi_built, hvd.mpi_enabled, hvd.gloo_enabled, hvd.ddl_built)] == [False] * 4
    assert [ask() for ask in (hvd.ccl_built, hvd.cuda_built, hvd.rocm_built)] == [False] * 3
    assert hvd.gloo_built() is True
    assert hvd.nccl_built() == 0
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.mpi_threads_supported()


def test_questions_about_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, is_mpi in [
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, True),
        ({"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0", "PMI_SIZE": "2", "PMI_RANK": "0"}, True),
        ({"SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "PMI_SIZE": "2", "PMI_RANK": "0"}, False),
        ({"RONDE_SIZE": "2", "RONDE_RANK": "0"}, False),
        ({}, False),
    ]:
        with monkeypatch.context() as during:
            for name, value in variables.items():
                during.setenv(name, value)
            assert hvd.mpi_built() is is_mpi, variables
            assert mpi.has_started_this() is is_mpi, variables
    assert hvd.gloo_built() is True


def test_threads_of_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mpi(types.ModuleType):
        THREAD_MULTIPLE = 3
        level, is_initialized, is_finalized = 3, True, False

        def Is_initialized(self) -> bool:  # noqa: N802 -- the names of mpi4py
            return self.is_initialized

        def Is_finalized(self) -> bool:  # noqa: N802
            return self.is_finalized

        def Query_thread(self) -> int:  # noqa: N802
            return self.level

    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert mpi.has_threads()
    monkeypatch.setenv("HOROVOD_MPI_THREADS_DISABLE", "1")
    assert not mpi.has_threads()
    module = Mpi("mpi4py.MPI")
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", module)
    assert mpi.has_threads()
    module.level = 2
    assert not mpi.has_threads()
    monkeypatch.delenv("HOROVOD_MPI_THREADS_DISABLE")
    module.is_finalized = True
    assert mpi.has_threads()


class Connecting:
    """Replaces `ronde.connect` for a rank that waits for others until `proceed` is set."""

    def __init__(self) -> None:
        self.entered, self.proceed = threading.Event(), threading.Event()
        self.calls = 0

    def __call__(self, **settings: Any) -> Any:
        self.calls += 1
        self.entered.set()
        assert self.proceed.wait(20)
        if settings["rank"] == 9:
            raise hvd.RondeError("no such rank", "settings")
        numbers = {"size": 2, "local_rank": 0, "local_size": 2, "cross_rank": 0, "cross_size": 1}
        return types.SimpleNamespace(
            rank=settings["rank"], is_homogeneous=True, close=lambda: None, end_of_program=lambda: None, **numbers
        )


@pytest.fixture
def connecting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connecting]:
    made = Connecting()
    monkeypatch.setattr(basics, "connect", made)
    monkeypatch.setenv("RONDE_SOCKET", "/nowhere")
    yield made
    made.proceed.set()
    hvd.shutdown()


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def test_threads_share_one_session_and_are_one_rank(connecting: Connecting) -> None:
    first, began = in_thread(lambda: hvd.init(rank=0))
    assert connecting.entered.wait(20)
    # Another rank is refused at once, also while the first thread waits for the other ranks.
    with pytest.raises(ValueError, match=r"with rank 1 in a process that is rank 0 already.*a client for each"):
        hvd.init(rank=1)
    waiting = [in_thread(hvd.init), in_thread(lambda: hvd.init(rank=0))]
    connecting.proceed.set()
    for thread, results in [(first, began), *waiting]:
        thread.join(20)
        assert results == [None]
    assert (connecting.calls, hvd.rank()) == (1, 0)
    with pytest.raises(ValueError, match="with rank 1 in a process that is rank 0 already"):
        hvd.init(rank=1)


def test_a_thread_begins_the_session_that_another_one_could_not(connecting: Connecting) -> None:
    first, failed = in_thread(lambda: hvd.init(rank=9))
    assert connecting.entered.wait(20)
    second, began = in_thread(lambda: hvd.init(rank=9))
    connecting.proceed.set()
    for thread in (first, second):
        thread.join(20)
    assert [str(each[0]) for each in (failed, began)] == ["no such rank [RONDE-E310]"] * 2
    assert connecting.calls == 2
    hvd.init(rank=1)
    assert hvd.rank() == 1


def test_constants_are_horovods() -> None:
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == [0, 1, 2, 3, 4, 5]


def test_hosts_of_mpi_need_sidecars(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "SIZE": 4, "LOCAL_RANK": 0, "LOCAL_SIZE": 2}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    monkeypatch.delenv("RONDE_SOCKET", raising=False)
    with pytest.raises(hvd.RondeError, match="mpirun has started 4 processes, 2 of them on this host"):
        without_launcher.settings_without_launcher({})
    monkeypatch.setenv("RONDE_SOCKET", "/somewhere")
    assert without_launcher.settings_without_launcher({}) == {"rank": 0}


def test_average_is_deprecated_and_does_not_go_with_op() -> None:
    with pytest.raises(ValueError, match="The op parameter supersedes average"):
        hvd.allreduce_async(torch.ones(1), average=True, op=hvd.Sum)
    with pytest.warns(DeprecationWarning, match="deprecated"), pytest.raises(ValueError, match="initialized"):
        hvd.allreduce_async(torch.ones(1), average=False)


def test_half_precision_and_back() -> None:
    compressed, context = hvd.Compression.fp16.compress(torch.ones(3, dtype=torch.float64))
    assert compressed.dtype == torch.float16
    assert hvd.Compression.fp16.decompress(compressed, context).dtype == torch.float64
    assert hvd.Compression.fp16.decompress(tensor=compressed, ctx=context).dtype == torch.float64
    assert hvd.Compression.none.decompress(compressed, ctx=None) is compressed
    whole = torch.ones(3, dtype=torch.int64)
    assert hvd.Compression.fp16.compress(whole)[0] is whole


@pytest.mark.usefixtures("alone")
class TestOptimizer:
    def wrapped(self, **options: Any) -> Any:
        parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
        options.setdefault("named_parameters", [("a", parameters[0]), ("b", parameters[1])])
        return hvd.DistributedOptimizer(torch.optim.Adam(parameters, lr=0.1), **options)

    def test_it_is_an_optimizer_of_the_same_class(self) -> None:
        optimizer = self.wrapped()
        assert isinstance(optimizer, torch.optim.Adam)
        assert type(optimizer).__name__ == "Adam"
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.05
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad(set_to_none=True)
        assert optimizer.param_groups[0]["params"][0].grad is None
        optimizer.zero_grad(set_to_none=False)

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"named_parameters": [torch.ones(1)]}, "sequence of tuples"),
            ({"named_parameters": [("x", torch.ones(1)), ("x", torch.ones(1))]}, "Found duplicates: x"),
            ({"named_parameters": [("x", torch.ones(1))]}, "were not named"),
            ({"backward_passes_per_step": 0}, "must be > 0"),
            ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "op != Average"),
            ({"op": "avg"}, "op is 'avg'; give a reduction of ronde"),
            ({"op": torch.distributed.ReduceOp.SUM}, "give a reduction of ronde"),
            ({"compression": "fp16"}, "compression is 'fp16'; give"),
        ],
    )
    def test_wrong_options(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            self.wrapped(**options)

    def test_a_model_is_no_optimizer(self) -> None:
        with pytest.raises(ValueError, match="wraps an optimizer of PyTorch, not a Linear"):
            hvd.DistributedOptimizer(torch.nn.Linear(2, 1))

    def test_names_may_be_left_out(self) -> None:
        names = self.wrapped(named_parameters=None)._ronde.names.values()
        assert list(names) == ["noname.0.0", "noname.0.1"]

    def test_state_survives_its_description(self) -> None:
        """What the root sends makes the same state elsewhere, up to the tensors' elements."""
        here, there = self.wrapped(), self.wrapped()
        for parameter in here.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        here.step()
        description = optimizer_state.describe(here)
        assert optimizer_state.difference(there, description) is None
        optimizer_state.take(there, description)
        assert optimizer_state.describe(there) == description
        names = [name for name, _ in optimizer_state.tensors_of(there, description)]
        assert names == [name for name, _ in optimizer_state.tensors_of(here, description)]
        assert "optimizer_state.1.exp_avg" in names

    def test_state_that_cannot_be_sent_is_rejected_on_all_ranks(self) -> None:
        optimizer = self.wrapped()
        optimizer.param_groups[0]["callback"] = print
        with pytest.raises(ValueError, match="cannot broadcast callback"):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        with pytest.raises(ValueError, match="LBFGS"):
            hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.ones(1)]), root_rank=0)

    def test_parameters_are_dicts_or_lists(self) -> None:
        hvd.broadcast_parameters({"b": torch.ones(1), "a": torch.ones(2)}, 0)
        hvd.broadcast_parameters([torch.ones(1), ("x", torch.ones(2))], 0)
        for wrong in (iter([torch.ones(1)]), {"a": 1}, torch.ones(1)):
            with pytest.raises(ValueError, match="invalid params"):
                hvd.broadcast_parameters(wrong, 0)


class Slow:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait(self) -> None:
        self.log.append(f"wait {self.name}")


def test_a_window_bounds_bytes_and_waits_for_the_oldest_first() -> None:
    log: list[str] = []
    flow = window.Window()

    def submit(name: str, nbytes: int) -> None:
        flow.submit(nbytes, lambda: log.append(name) or Slow(log, name))  # type: ignore[func-returns-value]

    half = window.WINDOW_BYTES // 2
    for name in "abc":
        submit(name, half)
    submit("huge", 10 * half)
    flow.finish()
    assert log == ["a", "b", "wait a", "c", "wait b", "wait c", "huge", "wait huge"]
    log.clear()
    for number in range(window.WINDOW_TENSORS + 1):
        submit(str(number), 0)
    assert log[-2:] == ["wait 0", str(window.WINDOW_TENSORS)]


def test_imports_start_no_threads() -> None:
    """In a new process: other tests of this one may have threads."""
    modules = "ronde.torch, ronde.torch.distributed, ronde.torch.elastic"
    program = f"import threading, {modules}; print([thread.name for thread in threading.enumerate()])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "['MainThread']\n", done.stdout + done.stderr
