"""Measures the cases of a world. Backends take turns, so that other work on the machine affects all alike."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ronde.bench.errors import WrongResultError
from ronde.bench.summary import Summary, slowest
from ronde.submission import MAPPED_BYTES_MIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.bench.cases import Case
    from ronde.bench.groups import Group
    from ronde.bench.named import Extras
    from ronde.bench.progress import Progress

# A loop is long enough for the CPU time of its start and end to be negligible.
LOOP_SECONDS = 0.3
LOOP_ITERATIONS_LEAST = 2
LOOP_ITERATIONS_MOST = 4000
# First iterations by purpose, so that no two purposes use the same data.
FIRST_WARM_UP = 1_000_000
FIRST_LOOP = 2_000_000
LOOP_WARM_UP = 3_000_000
NANOSECONDS = 1e-9
GIGABYTE = 1e9


@dataclasses.dataclass
class Series:
    """All samples of one backend's variant of a case."""

    group: Group
    variant: str
    times: list[int] = dataclasses.field(default_factory=list)  # nanoseconds of each iteration
    loop_times: list[float] = dataclasses.field(default_factory=list)  # seconds of an iteration without barriers
    cpu: list[float] = dataclasses.field(default_factory=list)  # seconds for a GB

    def entry(self) -> dict[str, Any]:
        """Returns the report's entry, with times in seconds."""
        return {
            "backend": self.group.name,
            "variant": self.variant,
            "seconds": dataclasses.asdict(Summary.of([time * NANOSECONDS for time in self.times])),
            "back_to_back_seconds": Summary.of(self.loop_times).median if self.loop_times else None,
            "cpu_seconds_per_gb": Summary.of(self.cpu).median if self.cpu else None,
        }


def measure_case(case: Case, groups: Sequence[Group], seed: int, progress: Progress) -> dict[str, Any]:
    """Measures all backends on one case. Returns the report's entry. Raises WrongResultError."""
    all_series = [series for group in groups for series in _open(case, group, seed)]
    for series in all_series:
        _measure(case, series, FIRST_WARM_UP, case.warm_up)
    for turn in range(case.rounds):
        for series in all_series:
            series.times += _measure(case, series, turn * case.iterations, case.iterations)
            progress.turn()
    if case.loops:
        # A loop holds a result while it computes the next one, in memory that single iterations have not touched.
        for series in all_series:
            _warm_up_loop(case, series)
    for turn in range(case.loops):
        for series in all_series:
            _loop(case, series, FIRST_LOOP + turn)
            progress.turn()
    for group in groups:
        group.ask("close")
    entries = [series.entry() for series in all_series]
    return {"collective": case.collective, "bytes": case.nbytes, "dtype": "float32", "entries": entries}


def turns(case: Case, variants: int) -> int:
    """Returns the number of turns of a case."""
    return (case.rounds + case.loops) * variants


def variants(name: str, case: Case, extras: Extras) -> int:
    """Returns a backend's number of variants of a case."""
    if name != "ronde":
        return 1
    is_shared = case.collective == "allreduce" and case.nbytes >= MAPPED_BYTES_MIN
    return extras.variants(case.collective) + is_shared + (1 if case.collective == "broadcast" else 2)


def _open(case: Case, group: Group, seed: int) -> list[Series]:
    answers = group.ask("open", collective=case.collective, count=case.count(group.ranks), seed=seed)
    return [Series(group, variant) for variant in answers[0]["variants"]]


def _measure(case: Case, series: Series, first: int, iterations: int) -> list[int]:
    answers = series.group.ask("measure", variant=series.variant, first=first, iterations=iterations)
    _check(case, series, answers)
    return slowest([answer["nanoseconds"] for answer in answers])


def _warm_up_loop(case: Case, series: Series) -> None:
    series.group.ask("prepare", iteration=LOOP_WARM_UP)
    series.group.ask("loop", variant=series.variant, iterations=LOOP_ITERATIONS_LEAST)
    _check(case, series, series.group.ask("check"))


def _loop(case: Case, series: Series, iteration: int) -> None:
    median = Summary.of(series.times).median * NANOSECONDS
    iterations = min(LOOP_ITERATIONS_MOST, max(LOOP_ITERATIONS_LEAST, round(LOOP_SECONDS / median)))
    series.group.ask("prepare", iteration=iteration)
    before = series.group.cpu_seconds()
    answers = series.group.ask("loop", variant=series.variant, iterations=iterations)
    used = series.group.cpu_seconds() - before
    _check(case, series, series.group.ask("check"))
    series.loop_times.append(max(answer["nanoseconds"] for answer in answers) * NANOSECONDS / iterations)
    series.cpu.append(used * GIGABYTE / (case.nbytes * iterations))


def _check(case: Case, series: Series, answers: Sequence[dict[str, Any]]) -> None:
    if len({answer.get("digest") for answer in answers}) > 1:
        title = f"{case.title()}, {series.group.ranks} ranks"
        raise WrongResultError(f"{series.group.label} ({series.variant}) gave ranks different results: {title}")
    for rank, answer in enumerate(answers):
        if wrong := answer.get("wrong"):
            raise WrongResultError(
                f"{series.group.label} ({series.variant}) gave a wrong result: {case.title()}, {series.group.ranks} "
                f"ranks, iteration {wrong['iteration']}, rank {rank}, element {wrong['element']}: "
                f"{wrong['got']!r} instead of {wrong['expected']!r}"
            )
