"""The worker program of `ronde.run`: `python -m ronde.run_worker here|elsewhere FOLDER`."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import pickle
import stat
import sys
import traceback
from typing import TYPE_CHECKING, Any, Callable, Protocol

import numpy

from ronde.client import connect
from ronde.run import CALL, ELSEWHERE, ERROR, HEADER, HERE, RESULT, dumps, write_private
from ronde.without_launcher import mpi_process, settings_without_launcher

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.client import Client

# A rank that is done waits for the slowest one, for up to a month. The launcher ends the job when a rank fails.
RESULTS_TIMEOUT_S = 30 * 24 * 3600.0


class Exchange(Protocol):
    """Transfers the call and the results between this rank and the program that called `ronde.run`."""

    def call(self) -> bytes:
        """The call, as the program has written it."""

    def deliver(self, result: bytes) -> None:
        """Hands a pickled result back."""


class Folder:
    """Exchanges through the folder itself: all ranks are on the program's host."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def call(self) -> bytes:
        """The call, as the program has written it."""
        return (self._path / CALL).read_bytes()

    def deliver(self, result: bytes) -> None:
        """Hands a pickled result back."""
        write_private(self._path / f"{RESULT}.{rank_number()}", result)


class Job:
    """Exchanges over the job's links: the lowest rank that sees the folder reads and writes for all."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path
        self._home = 0

    def call(self) -> bytes:
        """The call, as the program has written it."""
        with connect(**settings_without_launcher({})) as client:
            sees = numpy.array([is_private(self._path)])
            seen = client.allgather(sees, "ronde.run.sees")
            if not seen.any():
                raise RuntimeError(
                    f"no rank sees the folder {self._path} of the program that called ronde.run: name its host among "
                    "the hosts, or set TMPDIR to a folder that all hosts share"
                )
            self._home = int(seen.argmax())
            own = (self._path / CALL).read_bytes() if client.rank == self._home else b""
            content = broadcast_bytes(client, own, self._home)
            # Closing the first session ends those of all ranks.
            client.barrier("ronde.run.called")
            return content

    def deliver(self, result: bytes) -> None:
        """Hands a pickled result back."""
        with connect(**settings_without_launcher({}), start_timeout=RESULTS_TIMEOUT_S) as client:
            results = gather_bytes(client, result, self._home)
            for rank, content in enumerate(results):
                write_private(self._path / f"{RESULT}.{rank}", content)
            client.barrier("ronde.run.delivered")


def main(arguments: Sequence[str]) -> None:
    """Makes the call and delivers its result, or the reason why there is none."""
    where, folder = arguments[0], pathlib.Path(arguments[1])
    exchanges: dict[str, Callable[[pathlib.Path], Exchange]] = {HERE: Folder, ELSEWHERE: Job}
    exchange = exchanges[where](folder)
    try:
        call = exchange.call()
        result = dumps(perform(call))
        end_sessions()
        exchange.deliver(result)
    except Exception:
        if is_private(folder):
            write_private(folder / f"{ERROR}.{rank_number()}", traceback.format_exc().encode())
        raise


def perform(call: bytes) -> Any:
    """Makes the call, with the caller's folders on `sys.path`."""
    start = HEADER.size
    end = start + HEADER.unpack_from(call)[0]
    sys.path.extend(entry for entry in json.loads(call[start:end]) if entry not in sys.path)
    func, args, kwargs = pickle.loads(call[end:])
    try:
        return func(*args, **kwargs)
    except SystemExit as error:
        # The other ranks wait for this rank's result.
        raise RuntimeError(f"the function ended its process by SystemExit({error.code!r})") from error


def end_sessions() -> None:
    """Closes sessions that the function left open. The rank needs its own session to deliver the result."""
    if torch := sys.modules.get("ronde.torch"):
        torch.shutdown()
    gc.collect()


def is_private(path: pathlib.Path) -> bool:
    """Returns whether this is a folder of this user that no other user can enter. Its name may be known to others."""
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def rank_number() -> int:
    """Returns this worker's rank, from the variables of the launcher, which may be `mpirun`."""
    place = mpi_process(os.environ)
    return place.rank if "RONDE_RANK" not in os.environ and place is not None else int(os.environ["RONDE_RANK"])


def broadcast_bytes(client: Client, content: bytes, root: int) -> bytes:
    """Returns the root's bytes on all ranks."""
    length = int(client.broadcast(numpy.array([len(content)]), root, "ronde.run.call.length")[0])
    own = numpy.frombuffer(content, numpy.uint8) if client.rank == root else numpy.zeros(length, numpy.uint8)
    received: numpy.ndarray[Any, Any] = client.broadcast(own, root, "ronde.run.call")
    return received.tobytes()


def gather_bytes(client: Client, content: bytes, root: int) -> list[bytes]:
    """Returns the bytes of all ranks, by rank, on the root; nothing on the others."""
    lengths = client.allgather(numpy.array([len(content)]), "ronde.run.result.lengths")
    gathered = client.gather(numpy.frombuffer(content, numpy.uint8), root, "ronde.run.result")
    if gathered is None:
        return []
    return [piece.tobytes() for piece in numpy.split(gathered, numpy.cumsum(lengths)[:-1])]


if __name__ == "__main__":
    main(sys.argv[1:])
