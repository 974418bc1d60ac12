"""Sidecars for processes that no launcher of ronde has started: a program by itself, or one under `mpirun`.

The process with local rank 0 starts a sidecar that serves this host's processes only and ends with it; the others find
it in a directory that only this user can read. Under any other launcher of several processes (torchrun, srun, MPICH's
mpiexec, jsrun on several hosts) nothing is started: each process would train alone.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import pathlib
import select
import shutil
import stat
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from ronde import _ronde, command
from ronde.errors import RondeError

if TYPE_CHECKING:
    from collections.abc import Mapping

START_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.02
_FOUND_BY = ("RONDE_SOCKET", "RONDE_JOB")
_FILE = "sidecar.json"
_JOB = "local"
_START_TIMEOUT = "HOROVOD_START_TIMEOUT"
# Launchers whose processes on one host share a sidecar that local rank 0 starts.
_MPI = ("mpirun", "jsrun")


class MpiProcess(NamedTuple):
    """A process among those that `mpirun` has started.

    rank, size             -- among all
    local_rank, local_size -- among those of this host
    job                    -- what tells this run from others on this host
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str


def settings_without_launcher(given: dict[str, Any]) -> dict[str, Any]:
    """The settings that `ronde.connect` lacks when neither the environment nor the caller says where a sidecar is.

    Empty when one of them does, except for the rank, which is MPI's under `mpirun`. Raises RondeError with cause
    "settings" under `mpirun` on several hosts and under every other launcher of several processes, and "connect" when
    no sidecar can be started.
    """
    process = mpi_process(os.environ)
    if any(name in os.environ for name in _FOUND_BY) or given.get("socket") is not None or _is_served():
        is_ranked = "RONDE_RANK" in os.environ or given.get("rank") is not None
        return {} if process is None or is_ranked else {"rank": process.rank}
    if process is None:
        launched = _ronde.LaunchedBy.detect(dict(os.environ))
        if launched is not None and launched.is_one_of_several():
            raise RondeError(launched.refusal(), "settings")
        return {"socket": _own_sidecar(1), "job": _JOB, "rank": 0}
    if process.local_size != process.size:
        raise RondeError(
            f"mpirun has started {process.size} processes, {process.local_size} of them on this host, and no sidecar: "
            "on several hosts `horovodrun --mpi` starts sidecars and then mpirun, and `ronde run` does without; or "
            "start a `ronde sidecar` on each host and name its directory by RONDE_SOCKET",
            "settings",
        )
    timeout = _start_timeout()
    return {"socket": _shared_sidecar(process), "job": _JOB, "rank": process.rank, **timeout}


def _start_timeout() -> dict[str, float]:
    """How long ranks wait for the last one, as Horovod's variable says and nothing of ronde's does."""
    text = os.environ.get(_START_TIMEOUT)
    if text is None or "RONDE_START_TIMEOUT" in os.environ:
        return {}
    try:
        return {"start_timeout": float(text)}
    except ValueError:
        raise RondeError(f"{_START_TIMEOUT} is {text!r}; it is a number of seconds", "settings") from None


def mpi_process(environment: Mapping[str, str]) -> MpiProcess | None:
    """The place of this process among those of Open MPI's `mpirun` (or `jsrun`); None when neither has started it."""
    launched = _ronde.LaunchedBy.detect(dict(environment))
    if launched is None or launched.launcher not in _MPI:
        return None
    rank, size = launched.rank, launched.size
    local_rank, local_size = launched.local_rank, launched.local_size
    if rank is None or size is None or local_rank is None or local_size is None:
        return None
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or ""
    # The job's name in PMIx; without one, the session of the processes, which they share with their `mpirun`.
    job = job or f"session {os.getsid(0)}"
    return MpiProcess(rank, size, local_rank, local_size, job)


def _is_served() -> bool:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    usual = [pathlib.Path(runtime) / "ronde"] if runtime else []
    return any((directory / "rpc.sock").exists() for directory in [*usual, pathlib.Path("/run/ronde")])


class _Sidecar:
    """The sidecar that this process has started, once; it serves until this process ends."""

    process: subprocess.Popen[bytes] | None = None
    started_by = 0
    socket = ""


_sidecar = _Sidecar()


def _own_sidecar(ranks: int) -> str:
    """The directory of this process's own sidecar; starts it when there is none, or it has ended."""
    is_there = _sidecar.started_by == os.getpid() and _sidecar.process is not None
    if is_there and _sidecar.process is not None and _sidecar.process.poll() is None:
        return _sidecar.socket
    arguments = [_program(), "sidecar", "--local-ranks", str(ranks), "--job", _JOB]
    # In a session of its own: it is asked to leave by the end of its input, not by the interrupt that ends the program.
    process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    try:
        socket = _socket_directory(process)
    except BaseException:
        process.kill()
        process.wait()
        raise
    if not _sidecar.started_by:
        atexit.register(_end_sidecar)
        os.register_at_fork(after_in_child=_close_in_child)
    _sidecar.process, _sidecar.started_by, _sidecar.socket = process, os.getpid(), socket
    return socket


def _socket_directory(process: subprocess.Popen[bytes]) -> str:
    """Where the sidecar serves. It says more later, which nobody reads: its output is closed."""
    deadline = time.monotonic() + START_TIMEOUT_S
    line = b""
    assert process.stdout is not None
    with process.stdout as output:
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(output.fileno(), 65_536) if ready else b""
            if not part:
                how = "has ended" if ready else f"has said nothing for {START_TIMEOUT_S:.0f} s"
                raise RondeError(f"the sidecar that this process has started {how}; its reason is above", "connect")
            line += part
    message = json.loads(line.splitlines()[0])
    if message["type"] != "serving":
        raise RondeError(
            f"the sidecar that this process has started cannot serve: {message.get('reason', message)}", "connect"
        )
    return str(message["socket_dir"])


def _close_in_child() -> None:
    """In a forked child: the sidecar is its parent's, whose end must not wait for the child's."""
    if _sidecar.process is not None and _sidecar.process.stdin is not None:
        _sidecar.process.stdin.close()


def _end_sidecar() -> None:
    """Asks the sidecar to end, and waits for it: nothing is left behind."""
    process = _sidecar.process
    if process is None or _sidecar.started_by != os.getpid() or process.stdin is None:
        return
    process.stdin.close()
    try:
        process.wait(10.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _shared_sidecar(process: MpiProcess) -> str:
    """The directory of the sidecar of all processes of this host."""
    directory = _rendezvous_directory(process)
    file = directory / _FILE
    if process.local_rank == 0:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        _check_is_private(directory)
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        socket = _own_sidecar(process.local_size)
        written = file.with_suffix(".new")
        written.write_text(json.dumps({"socket": socket, "starter": _identity(os.getpid())}))
        written.rename(file)
        return socket
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            _check_is_private(directory)
            message = json.loads(file.read_text())
            # What an earlier run left behind does not count.
            if message["starter"] == _identity(message["starter"][0]):
                return str(message["socket"])
        time.sleep(_POLL_INTERVAL_S)
    raise RondeError(
        f"local rank 0 has started no sidecar within {START_TIMEOUT_S:.0f} s; all of the job must call init()",
        "connect",
    )


def _rendezvous_directory(process: MpiProcess) -> pathlib.Path:
    """A directory whose name all processes of this run know; the one with local rank 0 makes and removes it."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    digest = hashlib.sha256(process.job.encode()).hexdigest()[:16]
    return pathlib.Path(base) / f"ronde-mpi-{os.getuid()}-{digest}"


def _check_is_private(directory: pathlib.Path) -> None:
    """Raises RondeError unless nobody else can write to it or read it, and FileNotFoundError when it is not there."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise RondeError(f"{directory} is not a directory of this user alone; remove it", "settings")


def _identity(pid: int) -> list[int]:
    """A process and when it started; numbers of processes come again."""
    fields = pathlib.Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
    return [int(pid), int(fields[19])]


def _program() -> str:
    try:
        return command.find()
    except FileNotFoundError as error:
        raise RondeError(f"{error}, or start the program with `ronde run`", "connect") from error
