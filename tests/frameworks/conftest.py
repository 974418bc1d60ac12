"""What the tests of frameworks share with those of the Python SDK."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parent.parent.parent
SDK = ROOT / "sdk-python"
WORKERS = pathlib.Path(__file__).parent / "workers"
# The package, and modules of the SDK's tests.
sys.path[:0] = [str(SDK / "tests"), str(SDK / "python"), str(SDK / "horovod-compat" / "src")]
# A timeout ends a hang, so that its output is shown. TensorFlow takes up to 20 seconds to load on a busy machine.
TIMEOUT_S = 300
# Modules of the SDK's tests take these from here.
PACKAGE = SDK / "python"


def ronde_binary() -> str:
    """Returns the binary `ronde` of the tested build."""
    binary = os.environ.get("RONDE_BIN")
    if not binary or not pathlib.Path(binary).is_file():
        pytest.fail("RONDE_BIN does not name the binary `ronde`; run the tests by `make framework-test`")
    return binary


class Job(Protocol):
    """Runs a program as every rank of a job."""

    def __call__(
        self,
        program: pathlib.Path | str,
        ranks: int,
        *arguments: str,
        sidecars: int = 1,
        options: Sequence[str] = (),
        fails: bool = False,
        **variables: str,
    ) -> str:
        """Returns what the ranks print, errors too. Fails if the job fails, or with `fails` if it does not."""
        ...


@pytest.fixture
def job() -> Job:
    """Runs a program of `workers/`, or of a path, as every rank of a job, with this Python."""
    binary = ronde_binary()

    def run(
        program: pathlib.Path | str,
        ranks: int,
        *arguments: str,
        sidecars: int = 1,
        options: Sequence[str] = (),
        fails: bool = False,
        **variables: str,
    ) -> str:
        command = [binary, "run", "-np", str(ranks), "--start-timeout", "120"]
        # One is the default; elastic jobs refuse the option.
        command += ["--sidecars", str(sidecars)] if sidecars > 1 else []
        command += [*options, sys.executable, str(WORKERS / program), *arguments]
        environment: dict[str, Any] = {
            **os.environ,
            "PYTHONPATH": f"{SDK / 'python'}{os.pathsep}{SDK / 'horovod-compat' / 'src'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            env=environment,
            check=False,
        )
        assert (done.returncode != 0) == fails, f"{' '.join(command)}\n{done.stdout}"
        return done.stdout

    return run
