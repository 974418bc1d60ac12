"""Drawn programs run alike on the backend "ronde" and on Gloo; see `differential/`."""

from __future__ import annotations

import pytest
from conftest import ronde_binary

pytest.importorskip("torch")
pytest.importorskip("hypothesis")

from differential import c10d_programs
from differential.duel import Duel
from differential.search import check


@pytest.mark.parametrize(("ranks", "sidecars"), [(2, 1), (3, 2)])
def test_programs_of_torch_distributed_are_those_of_gloo(ranks: int, sidecars: int) -> None:
    ronde_binary()
    with Duel(ranks, sidecars) as duel:
        check(duel, c10d_programs.programs(ranks), 100)
        check(duel, c10d_programs.programs(ranks, "all"), 60)
        check(duel, c10d_programs.programs(ranks, "some"), 3)
