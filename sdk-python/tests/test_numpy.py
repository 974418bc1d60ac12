"""Every collective, type and reduction against NumPy: random cases on worlds of 1 to 8 ranks and 1 to 3 sidecars.

`workers/random_cases.py` draws, performs and checks the cases, and `workers/numpy_reference.py` defines how exact a
result has to be. This module counts coverage, and compares the bits of ranks and of runs. A failure shows the case; to
run it alone, give a part of its combination's name with `--only` to the script.
"""

from __future__ import annotations

import collections
import json
from typing import TYPE_CHECKING, Any, Callable

import pytest
from random_cases import combinations, joined_combinations

if TYPE_CHECKING:
    import pathlib

SEED = 20_240
CASES_MIN = 5_000
# All ranks on one sidecar, spread evenly, and unevenly.
WORLDS = [(ranks, sidecars) for sidecars in (1, 2, 3) for ranks in range(sidecars, 9)]
# Worlds whose cases are performed in a second run, in which as much as may be is different, and all
# results are copied.
AGAIN = [(1, 1), (3, 2), (5, 1), (6, 3), (8, 3)]
OTHERWISE = ("--fusion-threshold-mb", "0", "--lanes", "1")
# Small tensors travel with the messages that agree about them, but not in these worlds.
EXCHANGED = ("--eager-bytes", "0")
# What all ranks get, not each its own.
SHARED = ("allreduce", "grouped_allreduce", "allgather", "grouped_allgather", "broadcast", "joined allreduce")

Reports = list[dict[str, Any]]


class Outcomes:
    """What the ranks of each world have reported; a world runs when it is first asked for."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.reports: dict[tuple[int, int], Reports] = {}

    def of(self, world: Callable[..., str], ranks: int, sidecars: int) -> Reports:
        """The reports by rank."""
        if (ranks, sidecars) not in self.reports:
            self.reports[ranks, sidecars] = self.run(world, ranks, sidecars)
        return self.reports[ranks, sidecars]

    def run(self, world: Callable[..., str], ranks: int, sidecars: int, *other: str) -> Reports:
        """Runs the cases of a world, in a way of its own when there is `other`."""
        folder = self.folder / f"{ranks}-{sidecars}-{len(other)}"
        folder.mkdir()
        arguments = [str(folder), "--seed", str(SEED), *other]
        options = (OTHERWISE if other else ()) + (EXCHANGED if ranks % 2 else ())
        with pytest.MonkeyPatch.context() as patch:
            if other:
                patch.setenv("RONDE_MAPPED", "0")
            world("random_cases.py", ranks, sidecars, *arguments, options=options)
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return Outcomes(tmp_path_factory.mktemp("outcomes"))


@pytest.mark.parametrize(("ranks", "sidecars"), WORLDS)
def test_every_combination_agrees_with_numpy_and_between_ranks(
    world: Callable[..., str], outcomes: Outcomes, ranks: int, sidecars: int
) -> None:
    reports = outcomes.of(world, ranks, sidecars)
    wanted = {str(what) for what in combinations() if ranks > 1 or what.collective != "message"}
    wanted |= {f"joined {what}" for what in joined_combinations()}
    assert wanted - covered(reports).keys() == set()
    bits: dict[str, str] = {}
    for rank, report in enumerate(reports):
        for case, digest in report["digests"].items():
            if case.split("/")[2] in SHARED:
                assert bits.setdefault(case, digest) == digest, f"rank {rank} has other bits than lower ones: {case}"
    assert bits


@pytest.mark.parametrize(("ranks", "sidecars"), AGAIN)
def test_results_do_not_depend_on_order_fusion_lanes_and_memory(
    world: Callable[..., str], outcomes: Outcomes, ranks: int, sidecars: int
) -> None:
    again = outcomes.run(world, ranks, sidecars, "--order", "second", "--inline")
    for rank, (one, other) in enumerate(zip(outcomes.of(world, ranks, sidecars), again)):
        assert one["digests"] == other["digests"], f"rank {rank}"


def test_enough_cases_were_performed(
    world: Callable[..., str], outcomes: Outcomes, capsys: pytest.CaptureFixture[str]
) -> None:
    cases: collections.Counter[str] = collections.Counter()
    worst: dict[str, float] = {}
    for ranks, sidecars in WORLDS:
        reports = outcomes.of(world, ranks, sidecars)
        cases.update(covered(reports))
        for report in reports:
            for what, excess in report["worst"].items():
                worst[what] = max(worst.get(what, 0.0), excess)
    total = sum(cases.values())
    assert total >= CASES_MIN
    with capsys.disabled():
        print(f"\n{total} cases of {len(cases)} combinations on {len(WORLDS)} worlds")
        for collective, each in by_collective(cases).items():
            most = max((worst.get(what, 0.0) for what in each), default=0.0)
            print(f"  {collective:24}{sum(each.values()):6} cases of {len(each):3}, at most {most:.2f} bounds off")


def covered(reports: Reports) -> dict[str, int]:
    """How many cases there were of each combination: as many as some rank took part in."""
    cases: dict[str, int] = {}
    for report in reports:
        for what, count in report["covered"].items():
            cases[what] = max(cases.get(what, 0), count)
    return cases


def by_collective(cases: collections.Counter[str]) -> dict[str, dict[str, int]]:
    """The combinations of each collective."""
    found: dict[str, dict[str, int]] = {}
    for what, count in sorted(cases.items()):
        found.setdefault(what.partition("/")[0], {})[what] = count
    return found
