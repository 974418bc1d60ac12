"""Runs an agent of `ronde run` on a node of an elastic job, in a process that holds the resources there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from ronde.private_folder import PrivateFolder
from ronde.run import CALL

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

# What workers leave in the folder of the call; `ronde.run` describes the first two.
VALUE = "value"
FILES = re.compile(rf"(result|error|{VALUE})\.\d+(\.\d+)?")
_PIECE_BYTES = 1 << 20
_GPUS = "gpus"
# In a folder that is not the driver's.
_COPY = "copy"
_MADE_TIMEOUT_S, _POLL_S = 10.0, 0.05
_ATTEMPTS_MAX = 5
# Removes a folder when the process at the other end of standard input has ended, also by SIGKILL, unless another agent
# uses the folder. It tries several times: workers that are still ending may write to it, and the kernel may close the
# pipe before it releases the lock of that process. It runs as a child's child, in a session of its own: Ray kills the
# children of an actor with it.
_REMOVER = """
import fcntl, os, shutil, sys, time
if os.fork():
    os._exit(0)
sys.stdin.buffer.read()
for attempt in range(5):
    try:
        folder = os.open(sys.argv[1], os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        break
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(sys.argv[1], ignore_errors=True)
    except BlockingIOError:
        pass
    os.close(folder)
    time.sleep(1)
"""


def in_order(names: Iterable[str]) -> list[str]:
    """Returns the names of those files that workers leave, the values of each worker in the order of their numbers."""

    def order(name: str) -> tuple[str, list[int]]:
        kind, *numbers = name.split(".")
        # The number of a value stands after that of its worker.
        return kind, [int(number) for number in reversed(numbers)]

    return sorted(filter(FILES.fullmatch, names), key=order)


def gpus_of_host(path: str) -> str:
    """Returns the GPUs that the engine has given to the workers of this worker's node, with commas.

    path -- of the folder of the call
    """
    with contextlib.closing(PrivateFolder(pathlib.Path(path))) as folder:
        return folder.read(f"{_GPUS}.{os.environ['HOROVOD_HOSTNAME']}").decode()


class Agent:
    """Runs a command, and passes its standard input and output on. Its methods are called in several threads.

    folder -- the path of the folder in which the workers read the function that they call
    call   -- that function, pickled by the driver
    host   -- the name by which the launcher knows this node
    gpus   -- those that the engine has given to the workers here, with commas
    """

    def __init__(self, folder: str, call: bytes, host: str, gpus: str) -> None:
        self._folder, self._call, self._host, self._gpus = pathlib.Path(folder), call, host, gpus
        self._is_own = False
        self._lock: int | None = None
        self._remover: subprocess.Popen[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, command: str) -> None:
        """Starts the command in a shell. Raises OSError if the folder of the call cannot be made here."""
        self._join()
        with self._opened() as folder:
            # Workers get the launcher's environment, not that of this process.
            folder.replace(f"{_GPUS}.{self._host}", self._gpus.encode())
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", command], stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )

    def _join(self) -> None:
        """Makes the folder, unless it is there: the driver's own, or a copy that another process of this node made."""
        for _ in range(_ATTEMPTS_MAX):
            # What an agent that was killed here has left is removed at this moment, maybe.
            with contextlib.suppress(FileNotFoundError):
                self._make()
                if self._locked():
                    break
        else:
            raise OSError(f"{self._folder} was removed {_ATTEMPTS_MAX} times while it was being made")
        deadline = time.monotonic() + _MADE_TIMEOUT_S
        while not (self._folder / CALL).exists():
            if time.monotonic() > deadline:
                raise OSError(
                    f"{self._folder} has had no call for {_MADE_TIMEOUT_S} s: the process that made it has ended; "
                    "remove the folder"
                )
            time.sleep(_POLL_S)
        self._is_own = (self._folder / _COPY).exists()
        if self._is_own:
            self._remove_at_the_end()

    def _make(self) -> None:
        with contextlib.suppress(FileExistsError):
            self._folder.mkdir(mode=0o700)
            with self._opened() as folder:
                folder.write(_COPY, b"")
                folder.replace(CALL, self._call)

    def _locked(self) -> bool:
        """Keeps others from removing the folder. Returns whether it is still there.

        Raises PermissionError for a folder of another user, who could hold its lock for ever, and OSError if one that
        removes it does not end.
        """
        with self._opened() as folder:
            lock = folder.duplicate()
        try:
            deadline = time.monotonic() + _MADE_TIMEOUT_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise OSError(
                            f"another process has had {self._folder} locked for {_MADE_TIMEOUT_S} s"
                        ) from None
                    time.sleep(_POLL_S)
            is_there = os.path.samestat(os.fstat(lock), os.stat(self._folder))
        except BaseException:
            os.close(lock)
            raise
        if is_there:
            self._lock = lock
        else:
            os.close(lock)
        return is_there

    def _remove_at_the_end(self) -> None:
        """Starts what removes the folder when this process has ended, however it did."""
        command = [sys.executable, "-I", "-S", "-c", _REMOVER, str(self._folder)]
        self._remover = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        self._remover.wait()

    def end(self) -> None:
        """Ends the command and the processes of its session."""
        if self._process is None:
            return  # it could not be started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def write(self, content: bytes) -> None:
        """Writes to the command's standard input; closes it if there is nothing to write."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended, which `wait` reports
            if content:
                self._process.stdin.write(content)
                self._process.stdin.flush()
            else:
                self._process.stdin.close()

    def read(self, is_error: bool) -> bytes:
        """Returns what the command writes to standard output or error; waits for it. Nothing at the end."""
        assert self._process is not None
        pipe = self._process.stderr if is_error else self._process.stdout
        assert pipe is not None
        return os.read(pipe.fileno(), _PIECE_BYTES)

    def wait(self) -> int:
        """Returns the command's exit status when it has ended, as a shell does."""
        assert self._process is not None
        status = self._process.wait()
        return status if status >= 0 else 128 - status

    def taken(self) -> dict[str, bytes]:
        """Returns the files that workers have left since the last call, unless the driver sees the folder itself.

        The values of each worker are in the order in which it has left them.
        """
        if not self._is_own:
            return {}
        found = {}
        with self._opened() as folder:
            for name in in_order(os.listdir(self._folder)):
                mine = f".{os.getpid()}.{name}"
                with contextlib.suppress(FileNotFoundError):  # another process of this node has taken it
                    (self._folder / name).rename(self._folder / mine)
                    found[name] = folder.read(mine)
                    (self._folder / mine).unlink()
        return found

    def remove(self) -> None:
        """Removes the folder, unless it is that of the driver or another process uses it."""
        if self._lock is None:
            return
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_own:
                shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    @contextlib.contextmanager
    def _opened(self) -> Iterator[PrivateFolder]:
        with contextlib.closing(PrivateFolder(self._folder)) as folder:
            yield folder
