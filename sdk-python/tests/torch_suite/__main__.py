"""Compares ronde and Gloo by PyTorch's own tests, and fails where ronde passes fewer than is known.

    python -m torch_suite [--sizes 2,3] [--table FILE] [NAME...]

Prints a table with a row for each backend and number of processes, and each test that only one backend passes. The
exit status is 1 if a test that Gloo passes fails or is skipped with ronde and is not among the differences that
`differences` explains, if one of these passes by now, or if ronde passes fewer tests than Gloo.

This needs the stage `torch-suite` of tests/setup/environment.py, and RONDE_BIN, which names the binary `ronde`.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from torch_suite.differences import DIFFERENCES

_FOLDER = pathlib.Path(__file__).resolve().parent
# How long one test may take, and all of a run.
_TEST_TIMEOUT_S = 60
_RUN_TIMEOUT_S = 1800
_OUTCOMES = ("passed", "failed", "skipped")

Results = dict[str, dict[str, Any]]


def run(backend: str, size: int, names: list[str]) -> Results:
    """Runs tests, all without names. Returns what each came to. Raises RuntimeError if the run ends early."""
    environment = {
        **os.environ,
        "SUITE_BACKEND": backend,
        "WORLD_SIZE": str(size),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(_TEST_TIMEOUT_S),
        "PYTHONPATH": os.pathsep.join([str(_FOLDER.parent), str(_FOLDER.parents[1] / "python")]),
    }
    command = [sys.executable, "-m", "torch_suite.worker", *names]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=_RUN_TIMEOUT_S, env=environment, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    results = {each["name"]: each for each in (json.loads(line[len("RESULT ") :]) for line in lines)}
    if done.returncode or not results:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return results


def row(backend: str, size: int, results: Results) -> str:
    """Returns a row of the table."""
    counts = collections.Counter(each["outcome"] for each in results.values())
    seconds = sum(each["seconds"] for each in results.values())
    return f"| {backend} | {size} | {' | '.join(str(counts[outcome]) for outcome in _OUTCOMES)} | {seconds:.0f} |"


def compared(size: int, gloo: Results, ronde: Results) -> tuple[list[str], list[str]]:
    """Returns the rows of the tests that come to something else, and what is wrong about that."""
    rows, faults = [], []
    for name, of_gloo in sorted(gloo.items()):
        of_ronde = ronde[name]
        passes, gloo_passes = of_ronde["outcome"] == "passed", of_gloo["outcome"] == "passed"
        known = DIFFERENCES.get(name)
        reason = "only Gloo is left out, by its name" if passes else (known or of_ronde["reason"].strip()[-300:])
        if passes != gloo_passes:
            rows.append(f"| {name} | {size} | {of_gloo['outcome']} | {of_ronde['outcome']} | {reason} |")
        if not passes and (gloo_passes or of_ronde["outcome"] == "failed") and known is None:
            faults.append(f"{name}, {size} processes: {of_ronde['outcome']} with ronde: {of_ronde['reason']}")
        if passes and known is not None:
            faults.append(f"{name}, {size} processes: passes, so it is no difference any more")
    passed = [sum(each["outcome"] == "passed" for each in results.values()) for results in (gloo, ronde)]
    if passed[1] < passed[0]:
        faults.append(f"{size} processes: ronde passes {passed[1]} tests, and Gloo {passed[0]}")
    return rows, faults


def main() -> int:
    """Runs both backends and compares them."""
    parser = argparse.ArgumentParser(description="Compares ronde and Gloo by PyTorch's own tests.")
    parser.add_argument("--sizes", default="2,3", help="numbers of processes")
    parser.add_argument("--table", type=pathlib.Path, help="a file for the table")
    parser.add_argument("names", nargs="*", help="tests; default: all")
    arguments = parser.parse_args()
    totals, differences, faults = [], [], []
    for size in (int(text) for text in arguments.sizes.split(",")):
        results = {backend: run(backend, size, arguments.names) for backend in ("gloo", "ronde")}
        totals += [row(backend, size, each) for backend, each in results.items()]
        rows, wrong = compared(size, results["gloo"], results["ronde"])
        differences += rows
        faults += wrong
    head = ["| backend | processes | passed | failed | skipped | seconds |", "|---|---|---|---|---|---|"]
    middle = ["", "| test | processes | Gloo | ronde | reason |", "|---|---|---|---|---|"]
    text = "\n".join([*head, *totals, *middle, *differences]) + "\n"
    print(text)
    if arguments.table is not None:
        arguments.table.parent.mkdir(parents=True, exist_ok=True)
        arguments.table.write_text(text)
    for fault in faults:
        print(f"FAULT {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
