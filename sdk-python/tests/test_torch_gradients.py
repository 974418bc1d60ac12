"""Derivatives, steps with closures and optimizer states of `ronde.torch`, against one process with all ranks' data."""

from __future__ import annotations

from typing import Callable

import pytest

pytest.importorskip("torch")

WORLDS = [(2, 1), (3, 1), (4, 2)]


@pytest.mark.parametrize(("ranks", "sidecars"), WORLDS)
def test_derivatives_of_all_orders(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("torch_gradients.py", ranks, sidecars).count("checks of gradients hold") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), WORLDS)
def test_steps(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("torch_steps.py", ranks, sidecars).count("checks of steps hold") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), WORLDS)
def test_states(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("torch_states.py", ranks, sidecars).count("checks of states hold") == ranks
