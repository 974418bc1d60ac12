"""Starts sidecars that serve this host's processes only, and stops them when this process ends."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import select
import subprocess
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ronde import command
from ronde.errors import RondeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

START_TIMEOUT_S = 60.0
# As many workers as a sidecar serves: the limit LOCAL_RANKS_MAX of the protocol.
LOCAL_RANKS_MAX = 64
# A sidecar that was stopped serves its other workers for up to 5 s.
_STOP_TIMEOUT_S = 10.0
_U32_MAX = 2**32 - 1
# The prefix of variables for options of `ronde sidecar`.
PREFIX = "RONDE_SIDECAR_"
# Those that a sidecar of workers does not take from the environment: it has them from its job.
_NOT_OF_WORKERS = (
    "CERTS",
    "EXIT_WITH_WORKERS",
    "INDEX",
    "JOB",
    "JOB_SECRET_FILE",
    "LOCAL_RANKS",
    "PEERS",
    "PLACEMENT",
    "SOCKET_DIR",
    "START_TIMEOUT",
    "WORKER_UIDS",
)
# Those that a sidecar without peers does not have either.
_NOT_ALONE = (*_NOT_OF_WORKERS, "ADMIN_LISTEN", "LISTEN", "NETWORK_INTERFACES", "REPORT")
# The code of a sidecar that cannot bind its ports: the former one of this node drains its sessions for up to 5 s.
_PORT_IN_USE = "RONDE-E404"
_PORT_TIMEOUT_S = 10.0
_RETRY_S = 0.5


@dataclass(frozen=True)
class OwnSidecar:
    """A sidecar that this process started.

    process    -- the sidecar; the end of its standard input stops it
    started_by -- the ID of this process, which a forked child does not have
    socket     -- its session directory
    job        -- the name of its job
    tokens     -- for each rank that it serves, the path of the file with the token that authorizes its claim
    """

    process: subprocess.Popen[bytes]
    started_by: int
    socket: str
    job: str
    tokens: Mapping[int, str]

    def is_running(self) -> bool:
        """Returns whether this process started the sidecar, and it has not ended."""
        return self.started_by == os.getpid() and self.process.poll() is None


class _Started:
    """The sidecars that this process, or the one that it was forked from, started.

    lock     -- held while a sidecar's process is made, and during a fork: a child knows all inputs that it inherits
    starting -- processes that do not serve yet
    """

    sidecars: tuple[OwnSidecar, ...] = ()
    starting: tuple[subprocess.Popen[bytes], ...] = ()
    lock = threading.RLock()
    is_registered = False


_started = _Started()


def start(ranks: int, job: str) -> OwnSidecar:
    """Starts a sidecar for this many workers of this host, which ends with this process.

    ranks -- from 1 to LOCAL_RANKS_MAX
    job   -- the job's name, of a-z, 0-9, -, _ and .

    Raises RondeError with cause "connect" if it cannot be started or does not serve within START_TIMEOUT_S.
    """
    return start_with(["--local-ranks", str(ranks), "--job", job])


def start_with(
    options: Sequence[str],
    environment: Mapping[str, str] | None = None,
    timeout: float = START_TIMEOUT_S,
    keeps_output: bool = False,
) -> OwnSidecar:
    """Starts a sidecar with options of `ronde sidecar`, by which it ends when its standard input does.

    environment  -- its variables; default: those of this process
    timeout      -- seconds in which it has to serve; links to other sidecars come later
    keeps_output -- whether its later messages are kept, for `failure`

    Raises RondeError with cause "connect" if it cannot be started or does not serve in time.
    """
    arguments = [_program(), "sidecar", *options]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": environment}
    with _started.lock:
        if not _started.is_registered:
            atexit.register(stop_all)
            _started.is_registered = True
        # A new session: the end of its input stops the sidecar, not the interrupt that ends the program.
        try:
            process = subprocess.Popen(arguments, start_new_session=True, **pipes)
        except OSError as error:
            raise RondeError(f"cannot start the sidecar {arguments[0]}: {error}", "connect") from error
        _started.starting = (*_started.starting, process)
    started: tuple[OwnSidecar, ...] = ()
    try:
        socket, job, tokens = _serving(process, timeout)
        if not keeps_output and process.stdout is not None:
            process.stdout.close()
        sidecar = OwnSidecar(process, os.getpid(), socket, job, tokens)
        started = (sidecar,)
    except BaseException:
        process.kill()
        process.wait()
        raise
    finally:
        with _started.lock:
            _started.starting = tuple(each for each in _started.starting if each is not process)
            _started.sidecars = (*(each for each in _started.sidecars if each.is_running()), *started)
    return sidecar


def start_at_ports(
    options: Sequence[str], environment: Mapping[str, str], deadline: float, keeps_output: bool = False
) -> OwnSidecar:
    """Calls `start_with`; tries again for a while if the former sidecar of this node still has its ports.

    deadline -- of the monotonic clock, for the links to other sidecars

    Raises RondeError with cause "settings".
    """
    port_deadline = min(time.monotonic() + _PORT_TIMEOUT_S, deadline)
    while True:
        try:
            # Links come after that, but names of other nodes are resolved first, until its start timeout.
            timeout = max(0.0, deadline - time.monotonic()) + START_TIMEOUT_S
            return start_with(options, environment, timeout, keeps_output)
        except RondeError as error:
            if _PORT_IN_USE not in str(error) or time.monotonic() >= port_deadline:
                raise RondeError(str(error), "settings") from error
        time.sleep(_RETRY_S)


def variables_alone(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a sidecar without peers, which its program starts for workers of this host."""
    return _without(_NOT_ALONE, variables)


def variables_with_peers(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of a sidecar whose program names its peers and its job."""
    return _without(_NOT_OF_WORKERS, variables)


def _without(options: Sequence[str], variables: Mapping[str, str]) -> dict[str, str]:
    names = [PREFIX + name for name in options]
    return {name: value for name, value in variables.items() if name not in names}


def end_with_workers(sidecar: OwnSidecar, timeout: float) -> None:
    """Lets a sidecar end when the workers that connected to it have left. Without this, it ends with this process.

    timeout -- seconds in which a worker has to connect to one that has had none; else it ends, too
    """
    if sidecar.is_running() and sidecar.process.stdin is not None:
        message = {"type": "end_with_workers", "within_s": min(math.ceil(timeout), _U32_MAX)}
        with contextlib.suppress(OSError):  # it has ended by itself
            sidecar.process.stdin.write(json.dumps(message).encode() + b"\n")
            sidecar.process.stdin.flush()


def failure(sidecar: OwnSidecar, timeout: float) -> str | None:
    """Returns why a sidecar, started with `keeps_output`, has ended; None if it runs or has not reported a reason.

    timeout -- seconds to wait for its end
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        sidecar.process.wait(timeout)
    output = sidecar.process.stdout
    if sidecar.process.returncode is None or output is None or output.closed:
        return None
    for line in output.read().splitlines():
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            message = json.loads(line)
            if message.get("type") == "fatal":
                return str(message.get("reason"))
    return None


def stop(sidecar: OwnSidecar, waits: bool = True) -> None:
    """Stops a sidecar of this process.

    waits -- whether to wait for its exit, which workers that are still connected delay for up to 5 s
    """
    if waits:
        _stop((sidecar,))
    else:
        _close_input(sidecar)
    with _started.lock:
        _started.sidecars = tuple(each for each in _started.sidecars if each is not sidecar)


def stop_all() -> None:
    """Stops the sidecars of this process and waits for their exits."""
    _stop(_started.sidecars)
    _started.sidecars = ()


def _stop(sidecars: tuple[OwnSidecar, ...]) -> None:
    mine = [each for each in sidecars if each.started_by == os.getpid()]
    for sidecar in mine:
        _close_input(sidecar)
    for sidecar in mine:
        try:
            sidecar.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            sidecar.process.kill()
            sidecar.process.wait()
        if sidecar.process.stdout is not None:
            sidecar.process.stdout.close()


def _close_input(sidecar: OwnSidecar) -> None:
    """Ends a sidecar's standard input, which stops it."""
    if sidecar.process.stdin is not None:
        with contextlib.suppress(OSError):  # it has ended by itself, and a message to it is in the buffer
            sidecar.process.stdin.close()


def _before_fork() -> None:
    _started.lock.acquire()


def _after_fork() -> None:
    _started.lock.release()


def _close_in_child() -> None:
    """Closes the sidecars' inputs in a forked child, so that the end of the parent alone stops them."""
    _started.lock = threading.RLock()
    for process in (*_started.starting, *(sidecar.process for sidecar in _started.sidecars)):
        with contextlib.suppress(OSError):
            if process.stdin is not None:
                process.stdin.close()
    _started.starting, _started.sidecars = (), ()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_close_in_child)


def _serving(process: subprocess.Popen[bytes], timeout: float) -> tuple[str, str, dict[int, str]]:
    """Reads session directory, job and token files from the sidecar's first message.

    Leaves later messages in the pipe.
    """
    deadline = time.monotonic() + timeout
    line = b""
    output = process.stdout
    assert output is not None
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
        part = os.read(output.fileno(), 1) if ready else b""
        if not part:
            how = "has ended" if ready else f"has reported nothing for {timeout:.0f} s"
            raise RondeError(f"the sidecar that this process has started {how}; its reason is above", "connect")
        line += part
    try:
        message = json.loads(line)
        reason = None if message["type"] == "serving" else str(message.get("reason", message))
        if reason is None:
            tokens = {int(file["worker"]): str(file["path"]) for file in message["token_files"]}
            return str(message["socket_dir"]), str(message["job"]), tokens
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RondeError(
            f"the sidecar that this process has started reports {line[:200]!r}, which ronde of this release does not; "
            "install one release of both (RONDE_BIN names the program)",
            "connect",
        ) from error
    raise RondeError(f"the sidecar that this process has started cannot serve: {reason}", "connect")


def _program() -> str:
    try:
        return command.find()
    except FileNotFoundError as error:
        raise RondeError(f"{error}, or start the program with `ronde run`", "connect") from error
