"""Common fixtures of the tests: worlds of real processes, started with the binary `ronde`."""

from __future__ import annotations

import json
import os
import pathlib
import re
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
# Tests take a few seconds, and the start of a job up to 120. A timeout ends a hang, so that its output is shown.
WORLD_TIMEOUT_S = 300

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


def software_device_in(folder: pathlib.Path) -> None:
    """Puts the software device into a folder, under the names of NVIDIA's libraries."""
    library = pathlib.Path(ronde_binary()).with_name("libronde_software_device.so")
    assert library.is_file(), f"{library} is missing; build the workspace first (`make build-tests`)"
    for name in ("libcuda.so.1", "libnccl.so.2"):
        (folder / name).symlink_to(library)


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


@pytest.fixture
def software_device(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """Makes processes find the software device under the names of NVIDIA's libraries."""
    software_device_in(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("RONDE_GPU_STAGING", "ronde")
    return tmp_path


def gpu_pages(output: str) -> list[dict[str, Any]]:
    """Returns what `ronde status` showed of the GPUs of each sidecar, in the output of a program of tests."""
    return [json.loads(found) for found in re.findall(r"gpu (\{.*\})", output)]


@pytest.fixture
def three_devices(software_device: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs of the software device, which all processes see."""
    monkeypatch.setenv("RONDE_DEVICE_COUNT", "3")
    monkeypatch.setenv("RONDE_DEVICE_FIRST", "0")
    monkeypatch.setenv("RONDE_BIN", ronde_binary())


@pytest.fixture
def levels(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Makes processes find the software device, and perform all that they can in two levels."""
    software_device_in(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("RONDE_GPU_STAGING", "ronde")
    monkeypatch.setenv("RONDE_GPU_LEVELS", "2")
    monkeypatch.setenv("RONDE_DEVICE_COUNT", "4")
    monkeypatch.setenv("RONDE_BIN", ronde_binary())
    # The tests' PyTorch brings a library of NCCL's name without NCCL's functions.
    monkeypatch.setenv("RONDE_NCCL_LIBRARY", str(tmp_path / "libnccl.so.2"))
    return monkeypatch
