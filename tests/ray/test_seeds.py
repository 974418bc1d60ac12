"""The blocks about Ray of Horovod's documentation run unchanged. The files in `seeds` are these blocks."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = pathlib.Path(__file__).with_name("seeds_program.py")
TIMEOUT_S = 240


@pytest.mark.parametrize(
    ("blocks", "result"),
    [
        (["executor", "executor_run"], "[0, 1]"),
        (["elastic_function", "elastic_executor"], "None"),
        (["elastic_older"], "None"),
    ],
)
def test_a_block_of_horovods_documentation_runs(cluster: Any, blocks: list[str], result: str) -> None:
    variables = {**os.environ, "RAY_ADDRESS": cluster.address}
    command = [sys.executable, str(PROGRAM), *blocks]
    done = subprocess.run(command, env=variables, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert f"done: {result}\n" in done.stdout
