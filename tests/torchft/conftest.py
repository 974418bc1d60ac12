"""What the tests with torchft share with those of the Python SDK."""

from __future__ import annotations

import os
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent


def environment() -> dict[str, str]:
    """The variables of a process that imports the package of this checkout."""
    binary = os.environ.get("RONDE_BIN")
    if not binary or not pathlib.Path(binary).is_file():
        pytest.fail("RONDE_BIN does not name the binary `ronde`; run the tests by `make torchft-test`")
    return {**os.environ, "PYTHONPATH": str(ROOT / "sdk-python" / "python"), "PYTHONDONTWRITEBYTECODE": "1"}
