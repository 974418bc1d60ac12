"""Waits for the end of a training in containers, and prints its outcome in one line, as `make demo` does.

    python result.py --sidecars N --patience SECONDS

Reads what each sidecar reports at its end (/run/sidecars/INDEX/report.json) and what rank 0 reports of the training
(/report/training.json). When one of them failed it waits a few seconds for the others, and prints the reports so far.
The exit status is not 0 when the job failed, took too long, reached an accuracy below the demo's, or left different
weights on different ranks.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time

from demo import Outcome

SIDECARS = pathlib.Path("/run/sidecars")
TRAINING = pathlib.Path("/report/training.json")
POLL_S = 0.2
# After the first failure, for the others to report what they observed.
OTHERS_S = 5.0


def main() -> int:
    """Waits and reports; returns the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sidecars", type=int, required=True, help="how many there are")
    parser.add_argument("--patience", type=float, required=True, help="seconds until the training has to be over")
    arguments = parser.parse_args()
    start, began = time.monotonic(), time.time()
    paths = [SIDECARS / str(index) / "report.json" for index in range(arguments.sidecars)]
    deadline = start + arguments.patience
    failed = False
    while missing := [path for path in paths if not path.exists()]:
        if not failed and failures(paths):
            failed, deadline = True, min(deadline, time.monotonic() + OTHERS_S)
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    if found := failures(paths):
        print("result: the job failed\n" + "\n".join(found), file=sys.stderr)
        return 1
    if missing:
        print(f"result: after {arguments.patience:.0f} seconds there is no {missing[0]}", file=sys.stderr)
        return 1
    reports = [json.loads(path.read_text()) for path in paths]
    # A report of an earlier training may exist.
    if not TRAINING.exists() or TRAINING.stat().st_mtime < began:
        print("result: rank 0 ended without a report; see the workers' output for why", file=sys.stderr)
        return 1
    outcome = Outcome({"sidecars": reports}, json.loads(TRAINING.read_text()))
    outcome.explain()
    print(outcome.result(time.monotonic() - start), flush=True)
    return 0 if outcome.is_good() else 1


def failures(paths: list[pathlib.Path]) -> list[str]:
    """The failures in the reports so far."""
    reports = [json.loads(path.read_text()) for path in paths if path.exists()]
    return [f"sidecar {report['sidecar']}: {report['failure']}" for report in reports if report["failure"]]


if __name__ == "__main__":
    sys.exit(main())
