"""The package in worlds of real workers and sidecars. Each worker asserts by itself; see `workers/`."""

from __future__ import annotations

from typing import Callable

import pytest

# One rank; all on one sidecar; one each; unequal numbers.
WORLDS = [(1, 1), (2, 1), (2, 2), (3, 2)]


@pytest.mark.parametrize(("ranks", "sidecars"), WORLDS)
def test_collectives_agree_with_numpy(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("collectives.py", ranks, sidecars).count("agree with NumPy") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (3, 2)])
def test_failures_are_told_to_everybody(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("failures.py", ranks, sidecars).count("were told") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 2)])
def test_forks_signals_and_threads(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("processes.py", ranks, sidecars).count("are fine") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 2), (3, 1)])
def test_training_equals_one_process(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    pytest.importorskip("torch")
    # Twice: once more after a shutdown.
    assert world("training.py", ranks, sidecars).count("agrees with one process") == 2 * ranks
