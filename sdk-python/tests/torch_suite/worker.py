"""Runs the tests for one backend, and prints a line of JSON for each: name, outcome, seconds, reason.

python -m torch_suite.worker [NAME...]; the environment is that of the module `suite`.
"""

from __future__ import annotations

import json
import sys
import time
import unittest
from typing import Any

from torch_suite import suite


def outcome(name: str) -> dict[str, Any]:
    """Runs a test."""
    result = unittest.TestResult()
    begun = time.monotonic()
    suite.Suite(name).run(result)
    seconds = round(time.monotonic() - begun, 2)
    failed = result.failures + result.errors
    if failed:
        return {"name": name, "outcome": "failed", "seconds": seconds, "reason": failed[0][1]}
    if result.skipped:
        return {"name": name, "outcome": "skipped", "seconds": seconds, "reason": result.skipped[0][1]}
    return {"name": name, "outcome": "passed", "seconds": seconds, "reason": ""}


if __name__ == "__main__":
    for each in sys.argv[1:] or suite.names():
        print("RESULT " + json.dumps(outcome(each)), flush=True)
