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
    sidecar_uid: int | None = None,
    connect_timeout: float | None = None,
    start_timeout: float | None = None,
    operation_timeout: float | None = None,
    inline: bool = False,
    ring: bool | None = None,
    mapped: bool | None = None,
) -> Client:
    """Connects to the sidecar of this host, claims a rank and waits until all ranks of the job have attached.

    Defaults come from the environment, which `ronde run` sets. Timeouts are in seconds, above 0.

    socket            -- the sidecar's session directory; default: RONDE_SOCKET, else $XDG_RUNTIME_DIR/ronde or
                         /run/ronde, whichever has a sidecar
    job               -- the job's name; default: RONDE_JOB
    rank              -- the rank to claim, from 0; default: RONDE_RANK
    token_file        -- the file with the token that authorizes the claim; default: RONDE_TOKEN_FILE, else the rank's
                         file in the session directory
    sidecar_uid       -- the only user whose sidecar is accepted; default: RONDE_SIDECAR_UID, else any that may serve in
                         that directory
    connect_timeout   -- how long to try to reach the sidecar; default: RONDE_CONNECT_TIMEOUT, else 10
    start_timeout     -- how long to wait for all other ranks; default: RONDE_START_TIMEOUT, else 120
    operation_timeout -- how long an operation may take before this rank gives it up; default: RONDE_OPERATION_TIMEOUT,
                         else no limit
    inline            -- sends small tensors inside messages instead of through shared memory
    ring              -- whether messages use a ring in shared memory, if the sidecar accepts one, instead of gRPC;
                         default: RONDE_RING (0 or 1), else true
    mapped            -- whether results of 64 KiB or more stay in shared memory, as tensors that view it without a
                         copy. The memory is reused when the last view of it is gone. Such tensors are like others,
                         but a forked child sees its parent's changes to them. While half of the memory is in use,
                         results are copied. Default: RONDE_MAPPED (0 or 1), else true

    Raises, with `cause`:
    RondeError    -- "settings": a setting is missing or wrong (the text lists all of them, and names another launcher,
                     such as torchrun, if it started this process as one of several); "token": the token file cannot
                     be used, or the sidecar is another user's; "connect": no sidecar answers within
                     `connect_timeout`; "claim": the sidecar rejects the rank, token or job; "memory": shared memory
                     fails; "protocol": the sidecar is of another release of ronde; "thread": the session's thread
                     cannot be started
    TimedOutError -- "start": some ranks have not attached within `start_timeout`; the message names them
    PeerLostError, ShutDownError -- the job failed or ended before it started
    """
    given = {
        "RONDE_SOCKET": None if socket is None else os.fspath(socket),
        "RONDE_JOB": job,
        "RONDE_RANK": rank,
        "RONDE_TOKEN_FILE": None if token_file is None else os.fspath(token_file),
        "RONDE_SIDECAR_UID": sidecar_uid,
        "RONDE_CONNECT_TIMEOUT": connect_timeout,
        "RONDE_START_TIMEOUT": start_timeout,
        "RONDE_OPERATION_TIMEOUT": operation_timeout,
        "RONDE_RING": None if ring is None else int(ring),
        "RONDE_MAPPED": None if mapped is None else int(mapped),
    }
    settings = {name: str(value) for name, value in given.items() if value is not None}
    return Client(_ronde.Session.connect(settings, inline, f"ronde-python {_ronde.__version__}"))


def end_of_program(session: _ronde.Session) -> None:
    """Shuts the session down, unless an exception ends the program.

    In that case the rank counts as failed: the other ranks receive its exit code and traceback once the process is
    gone.
    """
    # `last_value` is set before exit handlers run. At an interactive prompt it is the exception of any line.
    if getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1"):
        session.abandon()
    else:
        session.close()


class SharedMemory(NamedTuple):
    """A worker's shared memory: inputs in flight, arrays of `Client.empty`, and results that stay there.

    mapped_bytes -- the bytes of all segments
    in_use_bytes -- the bytes in use among these
    slots        -- the number of inputs, arrays and results in it
    segments     -- the number of segments
    """

    mapped_bytes: int
    in_use_bytes: int
    slots: int
    segments: int


class Client(Collectives):
    """A worker's session with its sidecar. `connect` returns one; `close`, or its use as a context manager, ends it.

    Ranks match operations by name, in any order. Operations without a name are numbered in call order, which must then
    be the same on all ranks. Results are of the library of the input: PyTorch for PyTorch, NumPy for everything else.
    """

    def __init__(self, session: _ronde.Session) -> None:
        self._session = session
        self._sets = {0: ProcessSet(0, range(session.size), session.rank)}
        # Closes the session also if the program ends without `close`: a session that breaks counts as a lost rank.
        weakref.finalize(self, end_of_program, session)

    def end_of_program(self) -> None:
        """Closes the session at the end of the program, unless an exception ends the program.

        In that case the other ranks receive the failure once the process is gone.
        """
        end_of_program(self._session)

    def close(self) -> None:
        """Shuts the session down: the epoch ends for all ranks. Operations in flight fail."""
        self._session.close()

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """Allocates an uninitialized array or tensor in shared memory.

        Submitting it, or a contiguous part of it, makes no copy (zero-copy): the sidecar reads it in place. Do not
        write to it until the operation completes, also not after a call with `_async` returns. Otherwise it is like any
        other array or tensor. Its memory is released with the last view of it, also after `close`.

        shape -- the dimensions, or the length of a vector
        dtype -- a type that collectives accept: a name or a NumPy type for a NumPy array ("bfloat16" returns a
                 `ronde.Bfloat16`), a PyTorch type for a PyTorch tensor

        Raises ValueError for another type or an invalid shape; RefusedError with cause "limit" if shared memory is full
        (`--arena-mb`); and the session's error if it is over.
        """
        nbytes, view = viewer_of(dtype, shape)
        return view(self._session.empty(nbytes))

    def start_timeline(self, file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Records the phases of each operation in a file that Perfetto and chrome://tracing open (docs/TIMELINE.md).

        Rank 0 records for all ranks, until `stop_timeline` or the end of the session; on other ranks this does nothing.
        The recording starts before this call returns. A previous recording is completed first.

        file_path   -- the file; an existing one is overwritten
        mark_cycles -- also marks the times at which the coordinator issues orders

        Raises RondeError with the cause "timeline" if the file cannot be written.
        """
        self._session.start_timeline(os.fspath(file_path), mark_cycles)

    def stop_timeline(self) -> None:
        """Completes the file that `start_timeline`, or the variable RONDE_TIMELINE, began.

        Does nothing without a recording. Raises RondeError with the cause "timeline" if a part could not be written.
        """
        self._session.stop_timeline()

    @property
    def is_open(self) -> bool:
        """Whether operations can be submitted: the client is not closed and its epoch is not over."""
        return self._session.is_open

    @property
    def shared_memory(self) -> SharedMemory:
        """This worker's current use of shared memory; zeros when the client is closed."""
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
