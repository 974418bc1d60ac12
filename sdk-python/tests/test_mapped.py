"""Tensors that stay in shared memory, in worlds of real workers. The scripts in `workers/` assert."""

from __future__ import annotations

from typing import Callable

import pytest

WORLDS = [(1, 1), (2, 1), (3, 1), (4, 2)]


@pytest.mark.parametrize("ring", ["0", "1"])
@pytest.mark.parametrize(("ranks", "sidecars"), WORLDS)
def test_results_stay_in_shared_memory(
    world: Callable[..., str], monkeypatch: pytest.MonkeyPatch, ranks: int, sidecars: int, ring: str
) -> None:
    monkeypatch.setenv("RONDE_RING", ring)
    assert world("mapped.py", ranks, sidecars, options=("--arena-mb", "16")).count("stay where they are") == ranks


def test_results_are_copied_when_requested(world: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_MAPPED", "0")
    assert world("mapped.py", 2, 1, options=("--arena-mb", "16")).count("stay where they are") == 2


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 1), (2, 2), (3, 1)])
def test_gradients_have_the_bits_of_copied_ones(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    pytest.importorskip("torch")
    assert world("mapped_training.py", ranks, sidecars).count("gradients are the same") == 2 * ranks


@pytest.mark.parametrize("ring", ["0", "1"])
@pytest.mark.parametrize(("ranks", "sidecars"), WORLDS)
def test_inputs_in_shared_memory_are_not_copied(
    world: Callable[..., str], monkeypatch: pytest.MonkeyPatch, ranks: int, sidecars: int, ring: str
) -> None:
    monkeypatch.setenv("RONDE_RING", ring)
    assert world("zero_copy.py", ranks, sidecars, options=("--arena-mb", "16")).count("nothing is copied") == ranks


def test_inputs_in_shared_memory_are_not_copied_when_results_are(
    world: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RONDE_MAPPED", "0")
    assert world("zero_copy.py", 2, 1, options=("--arena-mb", "16")).count("nothing is copied") == 2


def test_tensors_of_pytorch_in_shared_memory(world: Callable[..., str]) -> None:
    pytest.importorskip("torch")
    assert world("zero_copy_torch.py", 2, 2).count("nothing is copied") == 2
