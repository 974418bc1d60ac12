"""The fixtures of the product tests: the wheel, and signals as in a terminal."""

from __future__ import annotations

import os
import pathlib
import signal

import pytest
from installed import pack_development_wheel


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> None:
    """A script's shell starts commands in the background with SIGINT ignored, which the tests' commands inherit."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The wheel under test."""
    if named := os.environ.get("RONDE_WHEEL"):
        return pathlib.Path(named).resolve()
    if not os.environ.get("RONDE_BIN"):
        pytest.skip("neither RONDE_WHEEL nor RONDE_BIN is set; run the tests by `make test-python`")
    return pack_development_wheel(tmp_path_factory.mktemp("dist"))
