"""Runs programs in a world of ronde and in one of a reference, and reports differences."""

from __future__ import annotations

import collections
import dataclasses
import json
import time
from typing import Any

from differential.accepted import reason_for
from differential.c10d_worker import GROUP_TIMEOUT_S
from differential.comparison import Difference, Program, Report, differences
from differential.worlds import World


class Duel:
    """A world of backend "ronde" and one of Gloo, of as many ranks."""

    def __init__(self, ranks: int, sidecars: int = 1) -> None:
        self.ranks = ranks
        self.ronde, self.reference = World("ronde", ranks, sidecars), World("gloo", ranks)
        self.tally = Tally()

    def __enter__(self) -> Duel:
        return self

    def __exit__(self, *exception: object) -> None:
        self.ronde.stop()
        self.reference.stop()

    def compare(self, program: Program) -> list[Difference]:
        """Returns the differences that are not in the table of accepted ones."""
        start = time.monotonic()
        found = differences(program, self._run(self.ronde, program), self._run(self.reference, program))
        reasons = [reason_for(program, each) for each in found]
        is_refused = any(reason and each.what == "error" for reason, each in zip(reasons, found))
        unexplained = []
        for each, reason in zip(found, reasons):
            if reason is None and is_refused and is_left_alone(each):
                self.tally.accepted["waits of ranks that Gloo has left alone"] += 1
            elif reason is None:
                unexplained.append(each)
            else:
                self.tally.accepted[reason] += 1
        self.tally.count(program, bool(unexplained), time.monotonic() - start)
        return unexplained

    def _run(self, world: World, program: Program) -> list[Report]:
        timeout_s = program.get("timeout_s")
        if timeout_s is not None:
            self._reset(world, timeout_s)
        reports = world.run(program)
        is_gone = any(report.keys() & {"hung", "died"} for report in reports)
        self.tally.replaced[world.backend] += is_gone
        if not is_gone and (timeout_s is not None or is_disordered(reports)):
            self._reset(world, GROUP_TIMEOUT_S)
        return reports

    def _reset(self, world: World, timeout_s: float) -> None:
        """Makes new process groups, or new processes if ranks cannot."""
        reports = world.run({"kind": "reset", "timeout_s": timeout_s})
        self.tally.replaced[world.backend] += any(report.keys() & {"hung", "died"} for report in reports)


def is_disordered(reports: list[Report]) -> bool:
    """Whether some ranks may wait for others or count operations otherwise: after any error."""
    return any("error" in step for report in reports for step in report["steps"])


def is_left_alone(difference: Difference) -> bool:
    """Whether a rank of Gloo has waited for one that refused a step."""
    phrases = ("Timed out", "Connection closed", "timeout")
    is_error = difference.what == "error" and difference.ronde is None
    return is_error and any(each in difference.reference["text"] for each in phrases)


@dataclasses.dataclass
class Tally:
    """Counts of programs that were run."""

    programs: int = 0
    different: int = 0
    seconds: float = 0.0
    operations: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    accepted: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    replaced: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def count(self, program: Program, is_different: bool, seconds: float) -> None:
        """Adds a program."""
        self.programs += 1
        self.different += is_different
        self.seconds += seconds
        for step in program["steps"]:
            self.operations[".".join(step[key] for key in ("call", "form") if key in step)] += 1

    def table(self) -> str:
        """The counts, for people."""
        rows = [f"{self.programs} programs, {self.different} with differences, {self.seconds:.0f} s"]
        rows += [f"    {count:8}  {name}" for name, count in sorted(self.operations.items())]
        rows += ["accepted differences (docs/PYTORCH.md explains them):"]
        rows += [f"    {count:8}  {name}" for name, count in sorted(self.accepted.items())]
        rows += [f"    {count:8}  times all processes of {name} were replaced" for name, count in self.replaced.items()]
        return "\n".join(rows)


def shown(program: Program) -> str:
    """A program as `python -m differential replay` reads it."""
    return json.dumps(program, separators=(",", ":"))


def report_of(program: Program, ranks: int, found: list[Any]) -> str:
    """Returns the message of a failing test."""
    lines = "\n".join(f"  {each}" for each in found[:8])
    return f"{len(found)} differences with {ranks} ranks, seed {program['seed']}:\n{lines}\nprogram: {shown(program)}"
