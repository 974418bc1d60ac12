"""`ronde run --starter`: a command that starts the workers, here a shell script instead of mpirun."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any

import pytest
from conftest import PACKAGE, ronde_binary

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 120
# The variables in which mpirun passes ranks to its processes.
STARTER = """
for rank in 0 1; do
    OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_SIZE=2 "$RONDE" worker "$@" & last=$!
done
wait $last
"""
WORKER = """
import os, numpy, ronde
with ronde.connect() as client:
    total = client.allreduce(numpy.array([client.rank + 1]), op=ronde.Sum)
    names = ["HOROVOD_LOCAL_RANK", "WORLD_SIZE", "PASSED", "PYTHONUNBUFFERED", "RONDE_WORLD"]
    fields = ["sum", total[0], client.rank, *(os.environ.get(name) for name in names)]
    # In one write: the workers share a pipe, and unbuffered `print` writes word by word.
    os.write(1, f"{' '.join(map(str, fields))}{os.linesep}".encode())
    client.barrier()
"""
# Reports that it runs, and then SIGTERM.
WAITING = 'trap "echo asked > $FIFO; exit 9" TERM; echo runs > $FIFO; while :; do sleep 0.1; done'


class Job:
    """A job with another command instead of `mpirun`."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.report = folder / "report.json"
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)

    def start(self, command: list[str], *options: str) -> subprocess.Popen[str]:
        words = [ronde_binary(), "run", "-np", "2", "--starter", "--report", str(self.report), *options, "--"]
        environment: dict[str, Any] = {**os.environ, "RONDE": ronde_binary(), "PYTHONPATH": str(PACKAGE)}
        environment.update(FIFO=str(self.fifo), TMPDIR=str(self.folder), XDG_RUNTIME_DIR=str(self.folder))
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen([*words, *command], env=environment, **streams)

    def run(self, command: list[str], *options: str) -> tuple[int, str, str]:
        with self.start(command, *options) as process:
            out, errors = process.communicate(timeout=TIMEOUT_S)
            return process.returncode, out, errors


@pytest.fixture
def job() -> Iterator[Job]:
    """A job, of which nothing must remain at the end."""
    with tempfile.TemporaryDirectory(prefix="r-") as folder:
        yield Job(pathlib.Path(folder))
        assert not list(pathlib.Path(folder).glob("ronde-*"))


@pytest.mark.parametrize("sidecars", ["1", "2"])
def test_workers_find_their_ranks(job: Job, sidecars: str) -> None:
    command = ["sh", "-c", STARTER, "sh", sys.executable, "-c", WORKER]
    status, out, errors = job.run(command, "--sidecars", sidecars, "-x", "PASSED=a b")
    assert status == 0, errors
    local = [0, 1] if sidecars == "1" else [0, 0]
    assert sorted(out.splitlines()) == [f"sum 3 {rank} {local[rank]} 2 a b 1 None" for rank in range(2)]
    report = json.loads(job.report.read_text())
    assert (report["exit"], report["failure"], report["starter_output"]) == (0, None, [])
    assert sum(sidecar["summary"]["operations"] for sidecar in report["sidecars"]) > 0


def test_the_jobs_exit_code_is_the_starters(job: Job) -> None:
    status, _, errors = job.run(["sh", "-c", "echo one >&2; echo two >&2; exit 4"])
    assert (status, errors) == (4, "one\ntwo\nronde: sh exited with code 4; its output is above [RONDE-E219]\n")
    report = json.loads(job.report.read_text())
    assert (report["code"], report["starter_output"]) == ("RONDE-E219", ["one", "two"])
    status, _, errors = job.run(["/no/such/mpirun"])
    assert status == 127
    assert "/no/such/mpirun exited with code 127 (command not found: /no/such/mpirun)" in errors
    status, _, errors = job.run([ronde_binary(), "worker", "true"])
    assert status == 64
    assert "OMPI_COMM_WORLD_RANK is not set: Open MPI's mpirun or jsrun has to start" in errors
    status, _, errors = job.run(["true"], "--output-filename", "out")
    assert status == 64
    assert "cannot be used with" in errors


def read(fifo: pathlib.Path) -> str:
    return fifo.read_text().strip()


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_starter_is_terminated_when_the_launcher_ends(job: Job, how: signal.Signals) -> None:
    with job.start(["sh", "-c", WAITING]) as process:
        assert read(job.fifo) == "runs"
        process.send_signal(how)
        assert read(job.fifo) == "asked"
        process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == (128 + how if how == signal.SIGTERM else -how)
    if how == signal.SIGKILL:
        wait_for_sidecars(job.folder)


def test_the_starter_is_terminated_when_a_sidecar_fails(job: Job) -> None:
    with job.start(["sh", "-c", WAITING]) as process:
        assert read(job.fifo) == "runs"
        (sidecar,) = sidecars_of(process.pid)
        os.kill(sidecar, signal.SIGKILL)
        assert read(job.fifo) == "asked"
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 128 + signal.SIGKILL
    assert "sidecar 0 on host localhost, which serves ranks 0-1, was killed by signal 9" in errors


def sidecars_of(launcher: int) -> list[int]:
    """The processes of sidecars below a launcher: children of its agents."""
    agents = children(launcher)
    return [
        child
        for agent in agents
        for child in children(agent)
        if b"--bootstrap" in pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def children(process: int) -> list[int]:
    found = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(child) for child in found.split()]


def wait_for_sidecars(folder: pathlib.Path) -> None:
    """Until the sidecars that ended with their launcher have removed their directories."""
    deadline = time.monotonic() + TIMEOUT_S
    while list(folder.glob("ronde-*")):
        assert time.monotonic() < deadline, "sidecars outlive their launcher"
        time.sleep(0.02)
