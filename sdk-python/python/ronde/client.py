"""The client: a worker's session with its sidecar."""

from __future__ import annotations

import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from ronde import _ronde
from ronde.collectives import Collectives
from ronde.process_set import ProcessSet
from ronde.tensors import viewer_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

_REASON_LENGTH_MAX = 500


def connect(
    socket: str | os.PathLike[str] | None = None,
    job: str | None = None,
    rank: int | None = None,
    token_file: str | os.PathLike[str] | None = None,
    *,
    connect_timeout: float | None = None,
    start_timeout: float | None = None,
    operation_timeout: float | None = None,
    inline: bool = False,
    ring: bool | None = None,
    mapped: bool | None = None,
) -> Client:
    """Pairs with the sidecar of this host, claims a rank and waits until all ranks of the job have done so.

    What is not given comes from the environment, as `ronde run` sets it. Timeouts are in seconds, above 0.

    socket            -- the sidecar's session directory; else RONDE_SOCKET, else $XDG_RUNTIME_DIR/ronde or /run/ronde,
                         whichever has a sidecar
    job               -- the job's name; else RONDE_JOB
    rank              -- the rank to claim, from 0; else RONDE_RANK
    token_file        -- the file that gives the right to the rank; else RONDE_TOKEN_FILE, else the rank's file in the
                         session directory
    connect_timeout   -- how long to try to reach the sidecar; else RONDE_CONNECT_TIMEOUT, else 10
    start_timeout     -- how long to wait for all other ranks; else RONDE_START_TIMEOUT, else 120
    operation_timeout -- how long an operation may take before this rank gives it up; else RONDE_OPERATION_TIMEOUT, else
                         as long as it takes
    inline            -- sends small tensors inside messages instead of through shared memory
    ring              -- whether messages go over a ring in shared memory, where the sidecar takes one, instead of gRPC;
                         else RONDE_RING (0 or 1), else they do
    mapped            -- whether results from 64 KiB on stay in shared memory, as tensors that view it: no copy is made,
                         and the memory is used again when the last view of it dies. They are like others, but
                         change in a forked child with its parent's. While half of the memory is in use, results are
                         copied. Else RONDE_MAPPED (0 or 1), else they do

    Raises, with `cause`:
    RondeError    -- "settings": a setting is missing or wrong (the text lists all of them, and names another launcher,
                     such as torchrun, that has started this process as one of several); "token": the token file cannot
                     be used; "connect": no sidecar answers within `connect_timeout`; "claim": the sidecar refuses the
                     rank, token or job; "memory": shared memory fails; "protocol": another release of ronde is on the
                     other side; "thread": the session's thread cannot be started
    TimedOutError -- "start": not all ranks have attached within `start_timeout`; the message names those missing
    PeerLostError, ShutDownError -- the job failed or ended before it started
    """
    given = {
        "RONDE_SOCKET": None if socket is None else os.fspath(socket),
        "RONDE_JOB": job,
        "RONDE_RANK": rank,
        "RONDE_TOKEN_FILE": None if token_file is None else os.fspath(token_file),
        "RONDE_CONNECT_TIMEOUT": connect_timeout,
        "RONDE_START_TIMEOUT": start_timeout,
        "RONDE_OPERATION_TIMEOUT": operation_timeout,
        "RONDE_RING": None if ring is None else int(ring),
        "RONDE_MAPPED": None if mapped is None else int(mapped),
    }
    settings = {name: str(value) for name, value in given.items() if value is not None}
    return Client(_ronde.Session.connect(settings, inline, f"ronde-python {_ronde.__version__}"))


def end_of_program(session: _ronde.Session) -> None:
    """Parts from the sidecar in order, unless an exception ends the program: the others are told of that instead.

    They hear of it when the process has gone, with its exit code and its traceback.
    """
    # Set before exit handlers run; at a prompt it is any line's exception.
    if getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1"):
        session.abandon()
    else:
        session.close()


class SharedMemory(NamedTuple):
    """A worker's shared memory: inputs in flight, arrays of `Client.empty`, and results that stay there.

    mapped_bytes -- of all segments
    in_use_bytes -- of these, what is in use
    slots        -- inputs, arrays and results that use it
    segments     -- how often memory was added
    """

    mapped_bytes: int
    in_use_bytes: int
    slots: int
    segments: int


class Client(Collectives):
    """A worker's session with its sidecar. Made by `connect`; ends with `close` or as a context manager.

    Ranks agree on operations by name, in any order. Operations without a name are numbered in the order of their calls,
    which must then be the same on all ranks. Results are of the kind of the input: NumPy for NumPy, PyTorch for
    PyTorch, NumPy for everything else.
    """

    def __init__(self, session: _ronde.Session) -> None:
        self._session = session
        self._sets = {0: ProcessSet(0, range(session.size), session.rank)}
        # Also when the program ends without a word: a session that just breaks counts as a lost rank.
        weakref.finalize(self, end_of_program, session)

    def end_of_program(self) -> None:
        """What becomes of the session when the program ends: `close`, unless an exception has ended it.

        Then the other ranks are told of that, once the process has gone.
        """
        end_of_program(self._session)

    def close(self) -> None:
        """Ends the session in order: the epoch ends for all ranks. Operations in flight fail."""
        self._session.close()

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """An array or a tensor in shared memory, whose elements are any, as those of `numpy.empty` are.

        The sidecar reads what is submitted from there, or from a part of it in one piece, where it lies: nothing is
        copied, and so nobody may write there until the operation is complete, also not after the call of a form with
        `_async`. It is like others otherwise. Its memory is given back when the last view of it dies, also after
        `close`.

        shape -- the dimensions, or the length of a vector
        dtype -- a type that collectives take: by its name or NumPy's for a NumPy array ("bfloat16" makes a
                 `ronde.Bfloat16`), PyTorch's for a PyTorch tensor

        Raises ValueError for another type and for what is no shape; RefusedError with cause "limit" where shared memory
        has no room (`--arena-mb`); and why the session is over, if it is.
        """
        nbytes, view = viewer_of(dtype, shape)
        return view(self._session.empty(nbytes))

    def start_timeline(self, file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Records what happens to each tensor in a file that Perfetto and chrome://tracing open (docs/TIMELINE.md).

        Rank 0 records for all ranks, until `stop_timeline` or the end of the session; on other ranks this does nothing.
        What happens from this call's return on is recorded. A recording before this one is completed first.

        file_path   -- the file, which is made anew
        mark_cycles -- also marks the moments at which the coordinator issues orders

        Raises RondeError with the cause "timeline" where the file cannot be written.
        """
        self._session.start_timeline(os.fspath(file_path), mark_cycles)

    def stop_timeline(self) -> None:
        """Completes what `start_timeline`, or the variable RONDE_TIMELINE, has begun; the file is whole then.

        Does nothing where nothing is recorded. Raises RondeError with the cause "timeline" when not all could be
        written.
        """
        self._session.stop_timeline()

    @property
    def is_open(self) -> bool:
        """Whether operations can be submitted: the client is not closed and its epoch not over."""
        return self._session.is_open

    @property
    def shared_memory(self) -> SharedMemory:
        """What this worker has in shared memory now; zeros when the client is closed."""
        return SharedMemory(*self._session.shared_memory())

    @property
    def submission_path(self) -> str:
        """How operations reach the sidecar: "ring", in shared memory, or "grpc"."""
        return self._session.submission_path

    @property
    def rank(self) -> int:
        """This worker's number in the job, from 0."""
        return self._session.rank

    @property
    def size(self) -> int:
        """The number of workers in the job."""
        return self._session.size

    @property
    def local_rank(self) -> int:
        """This worker's number among those of the same sidecar."""
        return self._session.local_rank

    @property
    def local_size(self) -> int:
        """The number of workers of the same sidecar."""
        return self._session.local_size

    @property
    def cross_rank(self) -> int:
        """The number of this sidecar among those that have a worker of this local rank."""
        return self._session.cross_rank

    @property
    def cross_size(self) -> int:
        """The number of sidecars that have a worker of this local rank."""
        return self._session.cross_size

    @property
    def is_homogeneous(self) -> bool:
        """Whether all sidecars serve the same number of workers."""
        return self._session.is_homogeneous

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._session.close(f"{kind.__name__}: {error}"[:_REASON_LENGTH_MAX])
