"""Common fixtures of the tests: worlds of real processes, started with the binary `ronde`."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any, Callable, NoReturn

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

WORKERS = pathlib.Path(__file__).parent / "workers"
PACKAGE = pathlib.Path(__file__).parent.parent / "python"
# Tests use parts of the workers.
sys.path.append(str(WORKERS))
# Tests take a few seconds. A timeout ends a hang, so that its output is shown.
WORLD_TIMEOUT_S = 180

World = Callable[..., str]

# A shell that starts the tests in the background ignores SIGINT, and programs that the tests start would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ronde_binary() -> str:
    """Returns the binary `ronde` of the tested build. Skips the test if RONDE_BIN is not set."""
    binary = os.environ.get("RONDE_BIN")
    if not binary:
        pytest.skip("RONDE_BIN does not name the binary `ronde`; run the tests by `make test-python`")
    if not pathlib.Path(binary).is_file():
        pytest.fail(f"RONDE_BIN is {binary}, where there is no file; build the binary `ronde` first (`make build`)")
    return binary


def leave_out(what: str, reason: str) -> NoReturn:
    """Skips the test, or fails it if RONDE_REQUIRE lists what it needs: CI lists what its machine has."""
    if what in os.environ.get("RONDE_REQUIRE", "").split(","):
        pytest.fail(f"RONDE_REQUIRE names {what}, but {reason}", pytrace=False)
    pytest.skip(f"LEFT OUT: {reason}")


@pytest.fixture
def tmp_path() -> Iterator[pathlib.Path]:
    """A temporary directory with a short path: that of a Unix socket has 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="rt-") as name:
        own = pathlib.Path(name) / "t"  # tests may move it within the directory above
        own.mkdir()
        yield own


@pytest.fixture
def world() -> World:
    """Runs a script of `workers/` as every rank of a job and returns the ranks' output. Fails if the job fails.

    world("collectives.py", ranks=4, sidecars=2)

    Further arguments are those of the script; `options` are those of `ronde run`.
    """
    binary = ronde_binary()

    def run(script: str, ranks: int, sidecars: int, *arguments: str, options: Sequence[str] = ()) -> str:
        job = [binary, "run", "-np", str(ranks), "--sidecars", str(sidecars), "--start-timeout", "120", *options]
        command = [*job, sys.executable, str(WORKERS / script), *arguments]
        environment: dict[str, Any] = {**os.environ, "PYTHONPATH": str(PACKAGE), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=WORLD_TIMEOUT_S, env=environment, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run
