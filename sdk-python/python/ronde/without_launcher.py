"""Starts sidecars for processes without a launcher of ronde: a single program, or processes under `mpirun`.

The process with local rank 0 starts a sidecar that serves this host's processes only and ends with it. The others find
it through a directory that only this user can read. Under any other launcher of several processes (torchrun, srun,
MPICH's mpiexec, jsrun on several hosts) nothing is started: each process would train alone.
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
    """A process that `mpirun` started.

    rank, size             -- among all processes
    local_rank, local_size -- among those of this host
    job                    -- identifies this run on this host
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    job: str


def settings_without_launcher(given: dict[str, Any]) -> dict[str, Any]:
    """Returns settings for `ronde.connect`; starts a sidecar if neither the environment nor the caller names one.

    If one of them does, only the rank may be set, to MPI's under `mpirun`. Raises RondeError with cause "settings"
    under `mpirun` on several hosts and under every other launcher of several processes, and "connect" if no sidecar
    can be started.
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
    """Returns the start timeout of Horovod's variable, unless ronde's own is set."""
    text = os.environ.get(_START_TIMEOUT)
    if text is None or "RONDE_START_TIMEOUT" in os.environ:
        return {}
    try:
        return {"start_timeout": float(text)}
    except ValueError:
        raise RondeError(f"{_START_TIMEOUT} is {text!r}; it is a number of seconds", "settings") from None


def mpi_process(environment: Mapping[str, str]) -> MpiProcess | None:
    """Returns this process's rank and size under Open MPI's `mpirun` (or `jsrun`); None if neither started it."""
    launched = _ronde.LaunchedBy.detect(dict(environment))
    if launched is None or launched.launcher not in _MPI:
        return None
    rank, size = launched.rank, launched.size
    local_rank, local_size = launched.local_rank, launched.local_size
    if rank is None or size is None or local_rank is None or local_size is None:
        return None
    job = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid") or ""
    # PMIx names the job. Without PMIx, use the session ID, which the processes share with their `mpirun`.
    job = job or f"session {os.getsid(0)}"
    return MpiProcess(rank, size, local_rank, local_size, job)


def _is_served() -> bool:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    usual = [pathlib.Path(runtime) / "ronde"] if runtime else []
    return any((directory / "rpc.sock").exists() for directory in [*usual, pathlib.Path("/run/ronde")])


class _Sidecar:
    """The sidecar that this process started; it serves until this process ends."""

    process: subprocess.Popen[bytes] | None = None
    started_by = 0
    socket = ""


_sidecar = _Sidecar()


def _own_sidecar(ranks: int) -> str:
    """Returns the session directory of this process's own sidecar. Starts one if there is none or it has ended."""
    is_there = _sidecar.started_by == os.getpid() and _sidecar.process is not None
    if is_there and _sidecar.process is not None and _sidecar.process.poll() is None:
        return _sidecar.socket
    arguments = [_program(), "sidecar", "--local-ranks", str(ranks), "--job", _JOB]
    # A new session: the end of its input stops the sidecar, not the interrupt that ends the program.
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
    """Reads the session directory from the sidecar's first message. Closes its output, so later messages are lost."""
    deadline = time.monotonic() + START_TIMEOUT_S
    line = b""
    assert process.stdout is not None
    with process.stdout as output:
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(output.fileno(), 65_536) if ready else b""
            if not part:
                how = "has ended" if ready else f"has reported nothing for {START_TIMEOUT_S:.0f} s"
                raise RondeError(f"the sidecar that this process has started {how}; its reason is above", "connect")
            line += part
    message = json.loads(line.splitlines()[0])
    if message["type"] != "serving":
        raise RondeError(
            f"the sidecar that this process has started cannot serve: {message.get('reason', message)}", "connect"
        )
    return str(message["socket_dir"])


def _close_in_child() -> None:
    """Closes the sidecar's input in a forked child, so that the end of the parent alone stops the sidecar."""
    if _sidecar.process is not None and _sidecar.process.stdin is not None:
        _sidecar.process.stdin.close()


def _end_sidecar() -> None:
    """Stops the sidecar and waits for its exit."""
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
    """Returns the session directory of the sidecar that all processes of this host share."""
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
            # Ignore the file of an earlier run.
            if message["starter"] == _identity(message["starter"][0]):
                return str(message["socket"])
        time.sleep(_POLL_INTERVAL_S)
    raise RondeError(
        f"local rank 0 has started no sidecar within {START_TIMEOUT_S:.0f} s; all of the job must call init()",
        "connect",
    )


def _rendezvous_directory(process: MpiProcess) -> pathlib.Path:
    """Returns a directory that all processes of this run can name. Local rank 0 creates and removes it."""
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    digest = hashlib.sha256(process.job.encode()).hexdigest()[:16]
    return pathlib.Path(base) / f"ronde-mpi-{os.getuid()}-{digest}"


def _check_is_private(directory: pathlib.Path) -> None:
    """Raises RondeError if another user can access the directory, and FileNotFoundError if it does not exist."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise RondeError(f"{directory} is not a directory of this user alone; remove it", "settings")


def _identity(pid: int) -> list[int]:
    """Returns a process's ID and start time. IDs alone are reused."""
    fields = pathlib.Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()
    return [int(pid), int(fields[19])]


def _program() -> str:
    try:
        return command.find()
    except FileNotFoundError as error:
        raise RondeError(f"{error}, or start the program with `ronde run`", "connect") from error
