"""`horovod.run(use_mpi=True)`: functions on processes that Open MPI's mpirun starts, on this host and on several."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

import pytest
from conftest import PACKAGE, leave_out, ronde_binary
from test_horovodrun import COMPAT, TIMEOUT_S
from two_hosts import TwoHosts, two_hosts

import horovod
from horovod.runner import launch

pytest.importorskip("torch")
pytest.importorskip("cloudpickle")
FOLDER = pathlib.Path(sys.executable).parent


@pytest.fixture(autouse=True)
def mpirun_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    if not (FOLDER / "mpirun").is_file():
        leave_out("mpi", "there is no mpirun beside this Python; `make setup` installs it")
    monkeypatch.setenv("RONDE_BIN", ronde_binary())
    monkeypatch.setenv("PATH", f"{FOLDER}{os.pathsep}{os.environ['PATH']}")


def place(base: int) -> tuple[int, float, bool]:
    import torch

    import horovod.torch as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor([1.0 * base]), op=hvd.Sum).item()
    return hvd.rank(), total, os.environ["OMPI_COMM_WORLD_RANK"] == str(hvd.rank())


def fail_on_last() -> None:
    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    if rank == size - 1:
        raise LookupError(f"nothing at rank {rank}")
    import torch

    import horovod.torch as hvd

    hvd.init()
    hvd.allreduce(torch.ones(1))


def test_mpirun_starts_functions(capfd: pytest.CaptureFixture[str]) -> None:
    assert horovod.run(place, (2,), num_proc=3, use_mpi=True, mpi_args="-x PASSED=this --oversubscribe") == [
        (rank, 6.0, True) for rank in range(3)
    ]
    assert horovod.run(lambda: os.getenv("PASSED"), use_mpi=True, mpi_args="-x PASSED=this") == ["this"]
    assert horovod.run(lambda: 1, use_mpi=True, disable_cache=True) == [1]
    assert "horovod.run: --disable-cache has no effect here" in capfd.readouterr().err
    arguments = launch._HorovodArgs(num_proc=2, use_mpi=True, run_func=lambda: place(1)[:2])
    assert launch._run(arguments) == [(0, 2.0), (1, 2.0)]


def test_the_traceback_of_the_failed_rank_is_reported() -> None:
    with pytest.raises(RuntimeError, match=r"mpirun failed with exit code \d+: rank 1 failed\n\nTraceback") as caught:
        horovod.run(fail_on_last, num_proc=2, use_mpi=True)
    assert str(caught.value).rstrip().endswith("LookupError: nothing at rank 1")
    with pytest.raises(RuntimeError, match="mpirun failed with exit code 3: the launcher ended with exit code 3"):
        horovod.run(lambda: os._exit(3), use_mpi=True)


PROGRAM = """
import os, pathlib, sys
sys.path.insert(0, {tests!r})
import horovod, test_horovod_run_mpi as tests

hosts = sys.argv[1]
print("results", horovod.run(tests.place, (2,), num_proc=2, hosts=hosts, use_mpi=True))
try:
    horovod.run(tests.fail_on_last, num_proc=2, hosts=hosts, use_mpi=True)
except RuntimeError as error:
    print("raised", error)
"""


def program(hosts: TwoHosts, folder: str) -> subprocess.CompletedProcess[str]:
    """A program on the first of two hosts that calls functions on both; temporary folders are in `folder`."""
    environment: dict[str, Any] = {
        **os.environ,
        "PATH": f"{hosts.folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{PACKAGE}{os.pathsep}{COMPAT}",
        "TMPDIR": folder,
    }
    text = PROGRAM.format(tests=str(pathlib.Path(__file__).parent))
    command = hosts.on_first([sys.executable, "-c", text, ",".join(f"{address}:1" for address in hosts.addresses)])
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)


@pytest.mark.parametrize("folders", ["of each host", "shared"])
def test_functions_on_several_hosts(folders: str) -> None:
    with two_hosts() as hosts, tempfile.TemporaryDirectory(prefix="r-") as folder:
        if folders == "of each host":
            hosts.give_second_its_own(folder)
        done = program(hosts, folder)
        assert "results [(0, 4.0, True), (1, 4.0, True)]" in done.stdout, done.stdout + done.stderr
        text = done.stdout.partition("raised mpirun failed with exit code ")[2]
        assert "Traceback (most recent call last):" in text, done.stdout + done.stderr
        assert "LookupError: nothing at rank 1" in text
        assert os.listdir(folder) == []
        assert hosts.reached() == {hosts.addresses[1]}
