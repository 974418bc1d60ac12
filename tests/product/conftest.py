"""The fixtures of the product tests: the wheel."""

from __future__ import annotations

import os
import pathlib

import pytest
from installed import pack_development_wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The wheel under test."""
    if named := os.environ.get("RONDE_WHEEL"):
        return pathlib.Path(named).resolve()
    if not os.environ.get("RONDE_BIN"):
        pytest.skip("neither RONDE_WHEEL nor RONDE_BIN is set; run the tests by `make test-python`")
    return pack_development_wheel(tmp_path_factory.mktemp("dist"))
