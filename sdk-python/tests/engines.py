"""Smoke tests of integrations with cluster engines, which run in an environment of their own, where that exists."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

from conftest import leave_out, ronde_binary

ROOT = pathlib.Path(__file__).parent.parent.parent
TIMEOUT_S = 400


def check_first_test(stage: str, file: str, selection: str) -> None:
    """Runs a test in the environment of a stage of tests/setup, in a network namespace; leaves it out without either.

    stage     -- also the name of the recipe that makes the environment, `make STAGE-test`
    file      -- in tests/STAGE
    selection -- the test, as for `pytest -k`
    """
    ronde_binary()
    if os.geteuid() != 0:
        leave_out("netns", f"{stage} listens on all addresses, so it runs in a network namespace, made by root only")
    location = [sys.executable, str(ROOT / "tests" / "setup" / "environment.py"), "path", stage]
    # The environments' names depend on the Python that makes them, which is not that of this environment.
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    base = pathlib.Path(sys.base_prefix, "bin", "python3")
    location[0] = str(base if base.exists() else sys.executable)
    python = subprocess.run(location, env=variables, capture_output=True, text=True, check=True).stdout.strip()
    if not pathlib.Path(python).parent.parent.joinpath(f".{stage}").exists():
        leave_out(stage, f"its environment does not exist; `make {stage}-test` makes it")
    tests = [str(ROOT / "tests" / stage / file), "-k", selection]
    command = [python, "-m", "pytest", "-q", "-rs", "-c", str(ROOT / "sdk-python" / "pyproject.toml"), *tests]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    if "LEFT OUT" in done.stdout:
        leave_out(stage, f"its test was left out: {done.stdout}")
    # -q is given twice, so there is no sum: a dot for the test.
    assert done.stdout.startswith(". ")
