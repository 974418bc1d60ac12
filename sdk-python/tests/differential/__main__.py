"""Runs drawn programs for some time, or one program again.

    python -m differential run --seconds 1800 [--seed N] [--only ronde.torch|torch.distributed]
    python -m differential replay --ranks N PROGRAM      PROGRAM as a difference prints it

Exits with 1 when a difference was found that is not in the table of accepted ones.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time

from differential.search import Found, collect, smallest
from differential.suites import Suite, suites

# Programs between two lines of progress.
BATCH = 40


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--seconds", type=float, default=60.0)
    run.add_argument("--seed", type=int, default=0)
    run.add_argument("--only", default="")
    replay = commands.add_parser("replay")
    replay.add_argument("--ranks", type=int, default=2)
    replay.add_argument("program", help="JSON")
    given = parser.parse_args()
    return again(given.program, given.ranks) if given.command == "replay" else search(given)


def again(text: str, ranks: int) -> int:
    """Runs one program; the exit status."""
    program = json.loads(text)
    name = "torch.distributed" if program["kind"] == "c10d" else "ronde.torch"
    suite = next(each for each in suites() if each.name.startswith(name) and each.ranks == ranks)
    with suite.open() as duel:
        found = duel.compare(program)
    for difference in found:
        print(difference)
    print(f"{len(found)} differences")
    return 1 if found else 0


def search(given: argparse.Namespace) -> int:
    """Runs programs of all suites in turn until the time is up; the exit status."""
    end, number = time.monotonic() + given.seconds, given.seed
    found: dict[tuple[int, object], Found] = {}
    chosen = [suite for suite in suites() if given.only in suite.name]
    with contextlib.ExitStack() as stack:
        duels = [stack.enter_context(suite.open()) for suite in chosen]
        while time.monotonic() < end:
            for place, (suite, duel) in enumerate(zip(chosen, duels)):
                for signature, each in collect(duel, suite.strategy, BATCH, number).items():
                    if known := found.get((place, signature)):
                        known.count += each.count
                    else:
                        found[place, signature] = each
                        describe(suite, each)
                left = max(0.0, end - time.monotonic())
                programs = sum(each.tally.programs for each in duels)
                print(
                    f"seed {number}, {suite.name}: {programs} programs, {len(found)} findings, {left:.0f} s left",
                    flush=True,
                )
            number += 1
        shrunk = {key: smallest(duels[key[0]], chosen[key[0]].strategy, key[1], each) for key, each in found.items()}
        for suite, duel in zip(chosen, duels):
            print(f"\n{suite.name}: {duel.tally.table()}")
    report(chosen, shrunk)
    return 1 if found else 0


def report(chosen: list[Suite], found: dict[tuple[int, object], Found]) -> None:
    """Prints what was found, each with the smallest program."""
    print(f"\n{len(found)} differences that are not accepted")
    for (place, _), each in found.items():
        describe(chosen[place], each)


def describe(suite: Suite, found: Found) -> None:
    """Prints a finding, with the command that runs its program again."""
    print(f"\n{suite.name}, {found.count} times:")
    for difference in found.differences[:2]:
        print(f"  {difference}")
    text = json.dumps(found.program, separators=(",", ":"))
    print(f"  python -m differential replay --ranks {suite.ranks} '{text}'", flush=True)


if __name__ == "__main__":
    sys.exit(main())
