"""`torch.distributed` on ronde, in worlds of real workers. Each worker asserts by itself; see `workers/`."""

from __future__ import annotations

from typing import Callable

import pytest

pytest.importorskip("torch")


@pytest.mark.parametrize(
    ("ranks", "sidecars", "way"), [(1, 1, ""), (2, 1, "rendezvous"), (3, 2, ""), (4, 2, "rendezvous")]
)
def test_collectives_are_those_of_torch_distributed(
    world: Callable[..., str], ranks: int, sidecars: int, way: str
) -> None:
    assert world("c10d.py", ranks, sidecars, *way.split()).count("all collectives are right") == ranks


@pytest.mark.parametrize(("ranks", "sidecars"), [(1, 1), (2, 2), (3, 1)])
def test_ddp_trains_as_one_process_does(world: Callable[..., str], ranks: int, sidecars: int) -> None:
    assert world("ddp.py", ranks, sidecars).count("the same as one process") == ranks
