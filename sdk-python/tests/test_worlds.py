"""The package in worlds of real workers and sidecars. The scripts in `workers/` assert."""

from __future__ import annotations

import pathlib
from typing import Callable

import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
# Less than the largest tensor of bad_inputs.py, in MiB.
ARENA_MB = "16"
# One rank; all on one sidecar; one each; unequal numbers.
WORLDS = [(1, 1), (2, 1), (2, 2), (3, 2)]


@pytest.mark.parametrize("ring", ["1", "0"])
@pytest.mark.parametrize(("ranks", "sidecars"), WORLDS)
def test_collectives_agree_with_numpy(
    world: Callable[..., str], ranks: int, sidecars: int, ring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Messages over the ring in shared memory, and over gRPC.
    monkeypatch.setenv("RONDE_RING", ring)
    assert world("collectives.py", ranks, sidecars).count("agree with NumPy") == ranks


@pytest.mark.parametrize("ring", ["1", "0"])
@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (4, 2), (3, 3)])
def test_receives_from_any_source(
    world: Callable[..., str], ranks: int, sidecars: int, ring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RONDE_RING", ring)
    assert world("any_source.py", ranks, sidecars).count("came from any source") == ranks


@pytest.mark.parametrize("ring", ["1", "0"])
@pytest.mark.parametrize(("ranks", "sidecars"), [(3, 1), (4, 2)])
def test_members_form_process_sets(
    world: Callable[..., str], ranks: int, sidecars: int, ring: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RONDE_RING", ring)
    assert world("member_sets.py", ranks, sidecars).count("members have formed their sets") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(3, 1), (4, 2), (4, 4)])
def test_joins_of_process_sets(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("set_joins.py", ranks, sidecars).count("joins of sets hold") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (3, 2)])
def test_failures_reach_every_rank(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("failures.py", ranks, sidecars).count("failures reached every rank") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(3, 1), (3, 2)])
def test_bad_input_raises_with_the_reason(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    output = world("bad_inputs.py", ranks, sidecars, options=("--arena-mb", ARENA_MB))
    assert output.count("bad input raised with the reason") == ranks


def test_the_example_shows_every_rank(world: Callable[..., str]) -> None:
    output = world(str(EXAMPLES / "collectives.py"), 4, 2)
    for rank in range(4):
        assert output.count(f"rank {rank} ") >= 15
    assert "rank 2   [20 21 22 23 24]         -> [72]" in output, output


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 2)])
def test_forks_signals_and_threads(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("processes.py", ranks, sidecars).count("are fine") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 2), (3, 1)])
def test_training_matches_one_process(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    pytest.importorskip("torch")
    # Twice: once more after a shutdown.
    assert world("training.py", ranks, sidecars).count("agrees with one process") == 2 * ranks
