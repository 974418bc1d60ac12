"""A smoke test of `ronde.ray`, where the environment with Ray exists. `make ray-test` makes it, and runs all tests."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from conftest import leave_out, ronde_binary

ROOT = pathlib.Path(__file__).parent.parent.parent
TIMEOUT_S = 240


def test_functions_run_on_workers_of_ray() -> None:
    ronde_binary()
    if os.geteuid() != 0:
        leave_out("netns", "Ray listens on all addresses, so it runs in a network namespace, which only root can make")
    location = [sys.executable, str(ROOT / "tests" / "setup" / "environment.py"), "path", "ray"]
    # The environments' names depend on the Python that makes them, which is not that of this environment.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    base = pathlib.Path(sys.base_prefix, "bin", "python3")
    location[0] = str(base if base.exists() else sys.executable)
    python = subprocess.run(location, env=variables, capture_output=True, text=True, check=True).stdout.strip()
    if not pathlib.Path(python).parent.parent.joinpath(".ray").exists():
        leave_out("ray", "the environment with Ray does not exist; `make ray-test` makes it")
    tests = [str(ROOT / "tests" / "ray" / "test_executor.py"), "-k", "each_rank_returns"]
    command = [python, "-m", "pytest", "-q", "-rs", "-c", str(ROOT / "sdk-python" / "pyproject.toml"), *tests]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    # -q is given twice, so there is no sum: a dot for the test.
    assert done.stdout.startswith(". ")
