"""Searches drawn programs for differences, and for the smallest program that shows each."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Callable, Protocol

from hypothesis import HealthCheck, Phase, find, given, seed, settings
from hypothesis.errors import NoSuchExample
from hypothesis.strategies import SearchStrategy

from differential.comparison import Difference, Program
from differential.duel import report_of

# Programs that are tried in order to find a smaller one, and the time for it.
SHRINKS_MAX = 60
SHRINK_S = 60.0


class Compares(Protocol):
    """Runs a program and reports differences."""

    ranks: int

    def compare(self, program: Program) -> list[Difference]:
        """The differences that are not accepted."""
        ...


@dataclasses.dataclass
class Found:
    """Differences that are likely to have one cause."""

    program: Program
    differences: list[Difference]
    count: int = 1


def options(count: int, **changes: Any) -> settings:
    """How programs are drawn: nothing is kept between runs, and no example counts as too slow."""
    given: dict[str, Any] = {
        "max_examples": count,
        "deadline": None,
        "database": None,
        "phases": [Phase.generate],
        "suppress_health_check": list(HealthCheck),
        **changes,
    }
    return settings(**given)


def check(duel: Compares, strategy: SearchStrategy[Program], count: int) -> None:
    """Runs the same programs each time. Raises AssertionError for the first that differs."""

    @options(count, derandomize=True)
    @given(strategy)
    def run(program: Program) -> None:
        found = duel.compare(program)
        assert not found, report_of(program, duel.ranks, found)

    run()


def collect(duel: Compares, strategy: SearchStrategy[Program], count: int, number: int) -> dict[Any, Found]:
    """Runs programs determined by a seed, and continues after differences. Returns these by signature."""
    seen: dict[Any, Found] = {}

    @seed(number)
    @options(count)
    @given(strategy)
    def run(program: Program) -> None:
        differing = duel.compare(program)
        for signature in {each.signature for each in differing}:
            own = [each for each in differing if each.signature == signature]
            if signature in seen:
                seen[signature].count += 1
            else:
                seen[signature] = Found(program, own)

    run()
    return seen


def smallest(duel: Compares, strategy: SearchStrategy[Program], signature: Any, found: Found) -> Found:
    """The smallest program with such a difference that a bounded search finds; what was found before otherwise."""
    end = time.monotonic() + SHRINK_S
    best = found

    def has_it(program: Program) -> bool:
        nonlocal best
        if time.monotonic() > end:
            return False
        own = [each for each in duel.compare(program) if each.signature == signature]
        if own and len(str(program)) < len(str(best.program)):
            best = Found(program, own, found.count)
        return bool(own)

    condition: Callable[[Program], bool] = has_it
    try:
        find(strategy, condition, settings=options(SHRINKS_MAX, phases=[Phase.generate, Phase.shrink]))
    except NoSuchExample:  # it was rare, or its time is up
        return best
    return best
