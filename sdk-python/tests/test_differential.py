"""Drawn programs run alike on ronde and on a reference; see `differential/`.

The programs are the same in each run. `make differential` draws others, and finds the smallest that differs.
"""

from __future__ import annotations

import os
import pathlib

import pytest
from conftest import ronde_binary

pytest.importorskip("torch")
pytest.importorskip("hypothesis")

from differential import accepted, c10d_programs, torch_programs
from differential.duel import Duel
from differential.search import check
from differential.torch_duel import TorchDuel

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "PYTORCH.md"
HEADING, FOLLOWING = "## Differences from Gloo", "\n## "
SIZES = [pytest.param(2, 1, marks=pytest.mark.heavy), (3, 2)]


@pytest.mark.parametrize(("ranks", "sidecars"), SIZES)
def test_torch_distributed_programs_match_gloo(ranks: int, sidecars: int) -> None:
    ronde_binary()
    with Duel(ranks, sidecars) as duel:
        check(duel, c10d_programs.programs(ranks), 100)
        check(duel, c10d_programs.programs(ranks, "all"), 60)
        check(duel, c10d_programs.programs(ranks, "some"), 3)


@pytest.mark.parametrize(("ranks", "sidecars"), SIZES)
def test_ronde_torch_matches_one_process(ranks: int, sidecars: int) -> None:
    ronde_binary()
    with TorchDuel(ranks, sidecars) as duel:
        check(duel, torch_programs.collectives(ranks), 100)
        check(duel, torch_programs.norms(ranks), 25)
        for call in torch_programs.CALLS:
            check(duel, torch_programs.gradchecks(ranks, call), 2)


@pytest.mark.parametrize(("ranks", "sidecars"), SIZES)
def test_training_matches_one_process(ranks: int, sidecars: int) -> None:
    ronde_binary()
    with TorchDuel(ranks, sidecars) as duel:
        for optimizer in torch_programs.OPTIMIZERS:
            check(duel, torch_programs.trainings(ranks, optimizer), 4)


def test_accepted_differences_are_documented() -> None:
    """RONDE_REGENERATE=1 writes the table."""
    before, rest = PAGE.read_text().split(HEADING)
    section, after = rest.split(FOLLOWING, 1)
    introduction = section.split("\n|")[0].rstrip("\n")
    wanted = f"{before}{HEADING}{introduction}\n\n{accepted.rendered()}\n{FOLLOWING}{after}"
    if os.environ.get("RONDE_REGENERATE"):
        PAGE.write_text(wanted)
    assert PAGE.read_text() == wanted, "docs/PYTORCH.md has another table; RONDE_REGENERATE=1 writes it"
