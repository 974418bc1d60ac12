"""The worker program of `ronde.run`: `python -m ronde.run_worker FOLDER`."""

from __future__ import annotations

import json
import os
import pathlib
import pickle
import sys
import traceback
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from ronde import _ronde
from ronde.client import connect, last_rank, last_size
from ronde.elastic import RemovedFromJob, is_elastic
from ronde.frameworks import open_sessions
from ronde.private_folder import PrivateFolder, opened
from ronde.run import CALL, ERROR, HEADER, RESULT, dumps, with_rank
from ronde.without_launcher import settings_without_launcher

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

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder

    def call(self) -> bytes:
        """The call, as the program has written it."""
        return self._folder.read(CALL)

    def deliver(self, result: bytes) -> None:
        """Hands a pickled result back."""
        self._folder.write(f"{RESULT}.{rank_number()}", result)


class Job:
    """Exchanges over the job's links: the lowest rank that sees the folder reads and writes for all.

    folder -- None on ranks that do not see it
    path   -- of the folder, for errors
    """

    def __init__(self, folder: PrivateFolder | None, path: pathlib.Path) -> None:
        self._folder, self._path = folder, path
        self._home = 0

    def call(self) -> bytes:
        """The call, as the program has written it."""
        with connect(**settings_without_launcher({})) as client:
            seen = client.allgather(numpy.array([self._folder is not None]), "ronde.run.sees")
            if not seen.any():
                raise RuntimeError(
                    f"no rank sees the folder {self._path} of the program that called ronde.run: name its host among "
                    "the hosts, or set TMPDIR to a folder that all hosts share"
                )
            self._home = int(seen.argmax())
            own = self._folder.read(CALL) if self._folder is not None and client.rank == self._home else b""
            content = broadcast_bytes(client, own, self._home)
            # Closing the first session ends those of all ranks.
            client.barrier("ronde.run.called")
            return content

    def deliver(self, result: bytes) -> None:
        """Hands a pickled result back."""
        with connect(**settings_without_launcher({}), start_timeout=RESULTS_TIMEOUT_S) as client:
            results = gather_bytes(client, result, self._home)
            for rank, content in enumerate(results):
                assert self._folder is not None  # only the rank that sees it gathers results
                self._folder.write(f"{RESULT}.{rank}", content)
            client.barrier("ronde.run.delivered")


class ElasticFolder:
    """Exchanges through the folder itself. Workers of an elastic job come at any time and cannot ask others."""

    def __init__(self, folder: PrivateFolder | None, path: pathlib.Path) -> None:
        if folder is None:
            raise RuntimeError(
                f"this worker of an elastic job does not see the folder {path} of the program that started it: set "
                "TMPDIR there to a folder that all hosts share"
            )
        self._folder = folder

    def call(self) -> bytes:
        """The call, as the program has written it."""
        return self._folder.read(CALL)

    def deliver(self, result: bytes) -> None:
        """Hands a pickled result back, with the last rank of this worker and the size that the job had then."""
        self._folder.replace(f"{RESULT}.{rank_number()}", with_rank(last_rank(), last_size(), result))


def main(arguments: Sequence[str]) -> None:
    """Makes the call and delivers its result, or the reason why there is none."""
    path = pathlib.Path(arguments[0])
    with opened(path) as folder:
        try:
            exchange = _exchange(folder, path)
            result = dumps(perform(exchange.call()))
            # The sidecar accepts each rank once, and delivering the result may need a session.
            open_sessions.end_all()
            exchange.deliver(result)
        except Exception:
            if folder is not None:
                folder.replace(f"{ERROR}.{rank_number()}", traceback.format_exc().encode())
            raise


def _exchange(folder: PrivateFolder | None, path: pathlib.Path) -> Exchange:
    if is_elastic():
        return ElasticFolder(folder, path)
    return Folder(folder) if folder is not None and is_on_one_host() else Job(folder, path)


def perform(call: bytes) -> Any:
    """Makes the call, with the caller's folders on `sys.path`."""
    start = HEADER.size
    end = start + HEADER.unpack_from(call)[0]
    sys.path.extend(entry for entry in json.loads(call[start:end]) if entry not in sys.path)
    func, args, kwargs = pickle.loads(call[end:])
    try:
        return func(*args, **kwargs)
    except RemovedFromJob:
        raise
    except SystemExit as error:
        # The other ranks wait for this rank's result.
        raise RuntimeError(f"the function ended its process by SystemExit({error.code!r})") from error


def is_on_one_host() -> bool:
    """Returns whether the launcher has started all ranks on this host, at one sidecar; the same on all ranks."""
    size, local_size = os.environ.get("RONDE_SIZE"), os.environ.get("RONDE_LOCAL_SIZE")
    if size is not None and local_size is not None:
        return local_size == size
    launched = _ronde.LaunchedBy.detect(dict(os.environ))
    return launched is not None and launched.is_on_one_host()


def rank_number() -> int:
    """Returns this worker's rank, from the variables of the launcher, which may be `mpirun`.

    In an elastic job it is the number of the worker, whose rank may change.
    """
    if is_elastic():
        return int(os.environ["RONDE_WORKER"])
    launched = _ronde.LaunchedBy.detect(dict(os.environ))
    if "RONDE_RANK" not in os.environ and launched is not None and launched.rank is not None:
        return launched.rank
    return int(os.environ["RONDE_RANK"])


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
