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

from ronde import command
from ronde.errors import RondeError

START_TIMEOUT_S = 60.0
# As many workers as a sidecar serves: the limit LOCAL_RANKS_MAX of the protocol.
LOCAL_RANKS_MAX = 64
# A sidecar that was stopped serves its other workers for up to 5 s.
_STOP_TIMEOUT_S = 10.0
_U32_MAX = 2**32 - 1


@dataclass(frozen=True)
class OwnSidecar:
    """A sidecar that this process started.

    process    -- the sidecar; the end of its standard input stops it
    started_by -- the ID of this process, which a forked child does not have
    socket     -- its session directory
    job        -- the name of its job
    ranks      -- the number of workers that it serves
    """

    process: subprocess.Popen[bytes]
    started_by: int
    socket: str
    job: str
    ranks: int

    def is_running(self) -> bool:
        """Returns whether this process started the sidecar, and it has not ended."""
        return self.started_by == os.getpid() and self.process.poll() is None


class _Started:
    """The sidecars that this process, or the one that it was forked from, started."""

    sidecars: tuple[OwnSidecar, ...] = ()
    lock = threading.Lock()
    is_registered = False


_started = _Started()


def start(ranks: int, job: str) -> OwnSidecar:
    """Starts a sidecar for this many workers of this host, which ends with this process.

    ranks -- from 1 to LOCAL_RANKS_MAX
    job   -- the job's name, of a-z, 0-9, -, _ and .

    Raises RondeError with cause "connect" if it cannot be started or does not serve within START_TIMEOUT_S.
    """
    arguments = [_program(), "sidecar", "--local-ranks", str(ranks), "--job", job]
    # A new session: the end of its input stops the sidecar, not the interrupt that ends the program.
    try:
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    except OSError as error:
        raise RondeError(f"cannot start the sidecar {arguments[0]}: {error}", "connect") from error
    try:
        socket = _socket_directory(process)
    except BaseException:
        process.kill()
        process.wait()
        raise
    sidecar = OwnSidecar(process, os.getpid(), socket, job, ranks)
    with _started.lock:
        if not _started.is_registered:
            atexit.register(stop_all)
            os.register_at_fork(after_in_child=_close_in_child)
            _started.is_registered = True
        _started.sidecars = (*(each for each in _started.sidecars if each.is_running()), sidecar)
    return sidecar


def end_with_workers(sidecar: OwnSidecar, timeout: float) -> None:
    """Lets a sidecar end when the workers that connected to it have left. Without this, it ends with this process.

    timeout -- seconds in which a worker has to connect to one that has had none; else it ends, too
    """
    if sidecar.is_running() and sidecar.process.stdin is not None:
        message = {"type": "end_with_workers", "within_s": min(math.ceil(timeout), _U32_MAX)}
        with contextlib.suppress(OSError):  # it has ended by itself
            sidecar.process.stdin.write(json.dumps(message).encode() + b"\n")
            sidecar.process.stdin.flush()


def stop(sidecar: OwnSidecar) -> None:
    """Stops a sidecar of this process and waits for its exit."""
    _stop((sidecar,))
    with _started.lock:
        _started.sidecars = tuple(each for each in _started.sidecars if each is not sidecar)


def stop_all() -> None:
    """Stops the sidecars of this process and waits for their exits."""
    _stop(_started.sidecars)
    _started.sidecars = ()


def _stop(sidecars: tuple[OwnSidecar, ...]) -> None:
    mine = [each for each in sidecars if each.started_by == os.getpid()]
    for sidecar in mine:
        if sidecar.process.stdin is not None:
            with contextlib.suppress(OSError):  # it has ended by itself, and a message to it is in the buffer
                sidecar.process.stdin.close()
    for sidecar in mine:
        try:
            sidecar.process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            sidecar.process.kill()
            sidecar.process.wait()


def _close_in_child() -> None:
    """Closes the sidecars' inputs in a forked child, so that the end of the parent alone stops them."""
    _started.lock = threading.Lock()
    for sidecar in _started.sidecars:
        with contextlib.suppress(OSError):
            if sidecar.process.stdin is not None:
                sidecar.process.stdin.close()
    _started.sidecars = ()


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
    try:
        message = json.loads(line.splitlines()[0])
        serves = message["type"] == "serving"
        answer = str(message["socket_dir"] if serves else message.get("reason", message))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise RondeError(
            f"the sidecar that this process has started reports {line[:200]!r}, which ronde of this release does not; "
            "install one release of both (RONDE_BIN names the program)",
            "connect",
        ) from error
    if not serves:
        raise RondeError(f"the sidecar that this process has started cannot serve: {answer}", "connect")
    return answer


def _program() -> str:
    try:
        return command.find()
    except FileNotFoundError as error:
        raise RondeError(f"{error}, or start the program with `ronde run`", "connect") from error
