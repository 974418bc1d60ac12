"""`make soak`: a job under random faults, for a minute here."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from ronde.bench.network import Network

TESTS = pathlib.Path(__file__).parents[1]


def soak(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A run, which ends by itself."""
    why_not = Network.why_not()
    if why_not is not None:
        assert "netns" not in os.environ.get("RONDE_REQUIRE", "").split(","), why_not
        pytest.skip(why_not)
    return subprocess.run(
        [sys.executable, "-m", "soak", *options],
        cwd=TESTS,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_a_job_survives_a_minute_of_faults() -> None:
    done = soak("--seconds", "60", "--kinds", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    for what in ("hangs", "wrong elements", "wrong culprits"):
        assert f"| **{what}** | 0 |" in done.stdout, done.stdout
    assert done.stdout.count("| fault: ") >= 3, done.stdout


def test_a_wrong_element_fails_the_run() -> None:
    done = soak("--seconds", "1", "--hosts", "2", "--ranks-per-host", "1", RONDE_SOAK_SPOIL="1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "| **wrong elements** | 0 |" not in done.stdout
    assert "| **wrong elements** |" in done.stdout, done.stdout + done.stderr
