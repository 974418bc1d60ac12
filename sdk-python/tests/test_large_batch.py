"""The example of large batches: SGD, LARS and LAMB reach a useful accuracy on two ranks."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from conftest import PACKAGE, ronde_binary

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "large_batch.py"
TIMEOUT_S = 180


@pytest.mark.parametrize(("optimizer", "rate"), [("sgd", "0.1"), ("lars", "0.1"), ("lamb", "0.00707107")])
def test_the_example_learns(optimizer: str, rate: str) -> None:
    command = [ronde_binary(), "run", "-np", "2", sys.executable, str(EXAMPLE), "--optimizer", optimizer]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = re.search(rf"{optimizer}: batch 64, rate {re.escape(rate)}, accuracy (\d\.\d+)", done.stdout)
    assert found, done.stdout
    assert float(found[1]) > 0.9, done.stdout
