"""Suites: the source of drawn programs, and the worlds that run them."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Callable

from hypothesis import strategies as st

from differential import c10d_programs, torch_programs
from differential.duel import Duel
from differential.torch_duel import TorchDuel

Strategy = st.SearchStrategy[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Suite:
    """Programs of one kind in jobs of one size.

    open -- makes what runs them
    """

    name: str
    ranks: int
    strategy: Strategy
    open: Callable[[], Any]


def suites() -> list[Suite]:
    """All of them, in the order in which `make differential` takes turns."""
    sizes = ((2, 1), (3, 2))
    made = [
        Suite(f"torch.distributed, {ranks} ranks", ranks, distributed(ranks), partial(Duel, ranks, sidecars))
        for ranks, sidecars in sizes
    ]
    made += [
        Suite(
            f"ronde.torch, {ranks} ranks", ranks, torch_programs.everything(ranks), partial(TorchDuel, ranks, sidecars)
        )
        for ranks, sidecars in sizes
    ]
    return made


def distributed(ranks: int) -> Strategy:
    """Programs of `torch.distributed`, some of which are wrong."""
    right, refused = c10d_programs.programs(ranks), c10d_programs.programs(ranks, "all")
    disagreeing = c10d_programs.programs(ranks, "some")
    weights = [right] * 14 + [refused] * 4 + [disagreeing]
    return st.sampled_from(range(len(weights))).flatmap(lambda place: weights[place])
