"""The fixtures of the product tests: the wheel."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest
from installed import run

ROOT = pathlib.Path(__file__).parent.parent.parent
ENVIRONMENT = ROOT / "tests" / "setup" / "environment.py"
PACKING = ROOT / "sdk-python" / "packing" / "wheel.py"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The wheel under test."""
    if named := os.environ.get("RONDE_WHEEL"):
        return pathlib.Path(named).resolve()
    binary = os.environ.get("RONDE_BIN")
    if not binary:
        pytest.skip("neither RONDE_WHEEL nor RONDE_BIN is set; run the tests by `make test-python`")
    run([sys.executable, str(ENVIRONMENT), "packaging"])
    python = run([sys.executable, str(ENVIRONMENT), "path", "packaging"]).strip()
    out = tmp_path_factory.mktemp("dist")
    target = str(pathlib.Path(binary).parent.parent)
    run([python, str(PACKING), "--dev", "--out", str(out)], {**os.environ, "CARGO_TARGET_DIR": target})
    (path,) = out.glob("ronde-*.whl")
    return path
