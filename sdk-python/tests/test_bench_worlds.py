"""The benchmark measures what was requested: which worlds, and which backends in them."""

from __future__ import annotations

import contextlib
import types
from typing import TYPE_CHECKING, Any

import pytest

from ronde.bench.__main__ import _worlds, main
from ronde.bench.cases import Case, World
from ronde.bench.errors import BenchError
from ronde.bench.named import Extras
from ronde.bench.run import Run
from ronde.bench.train import Training

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Run:
    """A benchmark on a machine that nobody looks at."""
    monkeypatch.setattr("ronde.bench.machine.describe", dict)
    monkeypatch.setattr("ronde.bench.machine.warnings", lambda _: [])
    monkeypatch.setattr("ronde.bench.run.why_no_hosts", lambda: None)
    return Run("collectives", 1, {}, Extras(), None)


def test_numbers_of_ranks_that_several_hosts_cannot_share_are_skipped_unless_requested(
    bench: Run,
) -> None:
    assert _worlds(bench, None, (1, 2), (2, 3)) == [World(1, 2), World(1, 3), World(2, 2)]
    (note,) = bench.report["notes"]
    assert "skipped: 3 ranks cannot be divided evenly among 2 hosts" in note
    with pytest.raises(BenchError, match="divided evenly"):
        _worlds(bench, (2,), (1,), (3,))


def test_cases_are_measured_with_the_requested_peers_only(bench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    started: list[list[str]] = []

    @contextlib.contextmanager
    def groups(_run: Run, _world: World, backends: Sequence[str], *_rest: Any) -> Iterator[list[Any]]:
        started.append(list(backends))
        yield [types.SimpleNamespace(name=name) for name in backends]

    def measure_case(_case: Case, ready: Sequence[Any], *_rest: Any) -> dict[str, Any]:
        measured.extend(group.name for group in ready)
        return {}

    monkeypatch.setattr(Run, "_groups", groups)
    monkeypatch.setattr("ronde.bench.run.groups.why_not", lambda *_: None)
    monkeypatch.setattr("ronde.bench.run.measure_case", measure_case)
    monkeypatch.setattr("ronde.bench.run.measure_training", lambda _training, ready, *_: [one.name for one in ready])
    worlds, training = [World(1, 2), World(2, 2)], Training("mlp", 64, 1, 1)
    found = bench.measure(worlds, [Case("allreduce", 4, 1, 1, 1)], ["mpi"], training)
    assert measured == ["ronde", "mpi"] * 2
    assert started == [["ronde", "mpi", "gloo"], ["ronde", "mpi"]]
    assert found["worlds"][0]["training"] == ["ronde", "gloo"]


@pytest.mark.usefixtures("bench")
def test_a_peer_that_is_named_twice_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Sequence[str]] = []
    monkeypatch.setattr(Run, "measure", lambda _run, _worlds, _cases, peers, _training: given.append(peers))
    monkeypatch.setattr("ronde.bench.__main__._finish", lambda *_: None)
    assert main(["--peers", "mpi,gloo,mpi"]) == 0
    assert given == [["mpi", "gloo"]]
