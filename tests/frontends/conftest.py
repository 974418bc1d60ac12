"""What the tests of front ends share with those of the Python SDK: they run examples as jobs."""

from __future__ import annotations

import os
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
# Modules of the SDK's tests, and the package.
sys.path[:0] = [str(ROOT / "sdk-python" / "tests"), str(ROOT / "sdk-python" / "python")]

from digits_runs import Runner  # noqa: E402

# DeepSpeed compiles in its first run.
TIMEOUT_S = 900


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """Runs examples with this Python."""
    binary = os.environ.get("RONDE_BIN")
    if not binary or not pathlib.Path(binary).is_file():
        pytest.fail("RONDE_BIN does not name the binary `ronde`; run the tests by `make frontends-test`")
    return Runner(binary, tmp_path_factory.mktemp("runs"), TIMEOUT_S)
