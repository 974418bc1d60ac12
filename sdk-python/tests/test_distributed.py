"""`torch.distributed` on ronde, in worlds of real workers. The scripts in `workers/` assert."""

from __future__ import annotations

import pathlib
from typing import Callable

import pytest

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("ranks", "sidecars", "way"), [(1, 1, ""), (2, 1, "rendezvous"), (3, 2, ""), (4, 2, "rendezvous")]
)
def test_collectives_of_torch_distributed(world: Callable[..., str], ranks: int, sidecars: int, way: str) -> None:
    assert world("c10d.py", ranks, sidecars, *way.split()).count("all collectives are right") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 2), (3, 1)])
def test_ddp_trains_as_one_process_does(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("ddp.py", ranks, sidecars).count("the same as one process") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (3, 2)])
def test_results_are_written_in_order_and_in_time(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("c10d_works.py", ranks, sidecars, "ronde").count("results come in order") == ranks


def test_the_order_of_results_matches_gloo(world: Callable[..., str], tmp_path: pathlib.Path) -> None:
    assert world("c10d_works.py", 2, 1, "gloo", str(tmp_path / "store")).count("results come in order") == 2


def test_sizes_that_differ_between_ranks_are_errors(world: Callable[..., str]) -> None:
    assert world("c10d_sizes.py", 2, 2).count("sizes are compared") == 2


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 2), (3, 2)])
def test_types_shapes_and_hooks(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("c10d_types.py", ranks, sidecars).count("all types are right") == ranks
