"""The client: a worker's session with its sidecar."""

from __future__ import annotations

import os
import sys
import weakref
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from ronde import _ronde, follower
from ronde.collectives import Collectives
from ronde.device import GpuArray
from ronde.elastic.membership import is_elastic, worker_number
from ronde.errors import RondeError
from ronde.native_log import log_warnings
from ronde.process_set import ProcessSet
from ronde.replay import CONTINUE, ON_FAILURE, RAISE, Replay
from ronde.tensors import viewer_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

_REASON_LENGTH_MAX = 500
# Variables of `ronde run`, and those of PyTorch that it sets to the same values.
_OF_TORCH = (("RONDE_RANK", "RANK"), ("RONDE_SIZE", "WORLD_SIZE"))
_OF_TORCHRUN = "TORCHELASTIC_RUN_ID"
# The sidecar's words about a rank that another session has.
_IS_CLAIMED = "is claimed by a live session"


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
    on_failure: str = RAISE,
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
    on_failure        -- what happens to operations in flight when a rank of an elastic job is lost, the same on all
                         ranks: "raise" makes them raise PeerLostError; with "continue" the client enters the job's next
                         membership, and the remaining ranks complete `allreduce`, `broadcast` and `barrier` among
                         themselves (docs/ELASTIC.md). Rank and size of the client change then. No effect in other jobs

    Raises, with `cause`:
    RondeError    -- "settings": a setting is missing or wrong (the text lists all of them, and names another launcher,
                     such as torchrun, if it started this process as one of several); "token": the token file cannot
                     be used, or the sidecar is another user's; "connect": no sidecar answers within `connect_timeout`;
                     "claim": the sidecar rejects the rank, token or job; "memory": shared memory fails; "protocol": the
                     sidecar is of another release of ronde; "thread": the session's thread cannot be started
    TimedOutError -- "start": some ranks have not attached within `start_timeout`; the message names them
    PeerLostError, ShutDownError -- the job failed or ended before it started
    """
    if rank is None:
        _check_one_launcher()
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
    return _client({name: str(value) for name, value in given.items() if value is not None}, inline, on_failure)


def _check_one_launcher() -> None:
    """Raises RondeError with cause "settings" if torchrun, which `ronde run` has started, has several processes here.

    All of them have the rank of the one process that `ronde run` has started.
    """
    if _OF_TORCHRUN not in os.environ or os.environ.get("LOCAL_WORLD_SIZE", "1") == "1":
        return
    names = [(own, torchs, os.environ.get(own), os.environ.get(torchs)) for own, torchs in _OF_TORCH]
    if any(None not in (mine, other) and mine != other for *_, mine, other in names):
        numbers = ", ".join(f"{own} is {mine} and {torchs} is {other}" for own, torchs, mine, other in names)
        raise RondeError(
            f"`ronde run` has started torchrun, which has started this process: {numbers}. Use one launcher: "
            "`ronde run -np N python train.py`, or torchrun without `ronde run`",
            "settings",
        )


def _client(settings: dict[str, str], inline: bool, on_failure: str) -> Client:
    if on_failure not in ON_FAILURE:
        raise ValueError(f'on_failure is {on_failure!r}; give "raise" or "continue"')

    follower.install()

    def open_session() -> _ronde.Session:
        return _ronde.Session.connect(settings, inline, f"ronde-python {_ronde.__version__}")

    if on_failure == CONTINUE and is_elastic():
        replay = Replay(open_session, worker_number())
        return Client(replay.session, replay)
    job, rank = (settings.get(name, os.environ.get(name, "")) for name in ("RONDE_JOB", "RONDE_RANK"))
    try:
        client = Client(open_session())
        _sessions.note(job, rank, client)
        return client
    except RondeError as error:
        if error.cause == "claim" and _IS_CLAIMED in str(error) and _sessions.is_open(job, rank):
            raise RondeError(
                f"this process has a session of rank {rank} already; use its client, or close that one before it "
                "connects again (hvd.init does nothing while a session is open)",
                "claim",
            ) from None
        raise


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


def _continue(client: weakref.ref[Client], session: _ronde.Session) -> None:
    """Makes a client use the session of another membership."""
    if (found := client()) is not None:
        found._use(session)
        for callback in found._on_membership:
            callback()


def _refusal(client: weakref.ref[Client]) -> str:
    """Returns why a client cannot continue in another membership; empty if it can."""
    found = client()
    if found is not None and len(found._sets) > 1:
        return "it has process sets, whose ranks are others now"
    return ""


class _Sessions:
    """What outlives the sessions of this process."""

    last_rank: int | None = None
    last_size: int | None = None

    def __init__(self) -> None:
        # The last client of each rank of a job, by process: a forked child has none of its parent's.
        self._clients: dict[tuple[int, str, str], weakref.ref[Client]] = {}

    def note(self, job: str, rank: str, client: Client) -> None:
        """Keeps the client of a rank."""
        self._clients[os.getpid(), job, rank] = weakref.ref(client)

    def is_open(self, job: str, rank: str) -> bool:
        """Returns whether a client of this rank is open in this process."""
        found = self._clients.get((os.getpid(), job, rank))
        client = None if found is None else found()
        return client is not None and client.is_open


_sessions = _Sessions()


def last_rank() -> int | None:
    """Returns the rank of this process in its last session, which may be over; None before the first one."""
    return _sessions.last_rank


def last_size() -> int | None:
    """Returns the number of ranks of this process's last session, which may be over; None before the first one."""
    return _sessions.last_size


class GpuLevels(NamedTuple):
    """What a client has done on GPUs in two levels (RONDE_GPU_LEVELS, docs/GPU.md).

    operations    -- completed in two levels
    one_level     -- which might have had two levels, and had one
    bytes_inside  -- the bytes that NCCL took of this rank, within the host
    bytes_between -- the bytes that this rank contributed between hosts
    bytes_copied  -- the bytes that were copied within the GPU before
    """

    operations: int
    one_level: int
    bytes_inside: int
    bytes_between: int
    bytes_copied: int


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


class MembershipChange(NamedTuple):
    """A change of an elastic job's membership.

    membership     -- the number of the next membership
    added, removed -- how many workers it adds and removes
    """

    membership: int
    added: int
    removed: int


class Client(Collectives):
    """A worker's session with its sidecar. `connect` returns one; `close`, or its use as a context manager, ends it.

    Ranks match operations by name, in any order. Operations without a name are numbered in call order, which must then
    be the same on all ranks. Results are of the library of the input: PyTorch for PyTorch, NumPy for everything else.
    """

    def __init__(self, session: _ronde.Session, replay: Replay | None = None) -> None:
        self._replay = replay
        self._sets: dict[int, ProcessSet] = {}
        self._finalizer: weakref.finalize[..., Client] | None = None
        self._on_membership: list[Callable[[], None]] = []
        self._use(session)
        if replay is not None:
            # Weak, so that the session ends with the last reference to the client.
            me = weakref.ref(self)
            replay.on_session = lambda session: _continue(me, session)
            replay.refusal = lambda: _refusal(me)

    def _use(self, session: _ronde.Session) -> None:
        """Makes a session that of this client."""
        self._session = session
        _sessions.last_rank, _sessions.last_size = session.rank, session.size
        self._sets.clear()
        self._sets[0] = ProcessSet(0, range(session.size), session.rank)
        if self._finalizer is not None:
            self._finalizer.detach()
        # Closes the session also if the program ends without `close`: a session that breaks counts as a lost rank.
        self._finalizer = weakref.finalize(self, end_of_program, session)

    def on_membership(self, callback: Callable[[], None]) -> None:
        """Adds a function that is called when the client has entered another membership, with on_failure="continue".

        Rank and size have changed then, and interrupted operations are not complete yet. The function is called by the
        thread that waits for one of them or submits another one. It must not use the client's operations.
        """
        self._on_membership.append(callback)

    @property
    def native_session(self) -> _ronde.Session:
        """The session of the extension module, for ronde's own operations inside the graphs of a framework."""
        return self._session

    @property
    def on_failure(self) -> str:
        """What happens to operations in flight when a rank is lost: "continue" or "raise"."""
        return RAISE if self._replay is None else CONTINUE

    def end_of_program(self) -> None:
        """Closes the session at the end of the program, unless an exception ends the program.

        In that case the other ranks receive the failure once the process is gone.
        """
        end_of_program(self._session)

    def close(self) -> None:
        """Shuts the session down: the epoch ends for all ranks. Operations in flight fail."""
        self._close(None)

    def _close(self, reason: str | None) -> None:
        if self._replay is not None:
            self._replay.close()
        self._session.close(reason)
        log_warnings()

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32", device: int | None = None) -> Any:
        """Allocates an uninitialized array or tensor in shared memory, or an array in memory of a GPU.

        Submitting it, or a contiguous part of it, makes no copy (zero-copy): the sidecar reads it in place. Do not
        write to it until the operation completes: a call with `_async` returns before that. Otherwise it is like any
        other array or tensor. Its memory is released with the last view of it, even after `close`. With
        on_failure="continue" operations that may be performed again do copy it.

        shape -- the dimensions, or the length of a vector
        dtype -- a type that collectives accept: a name or a NumPy type for a NumPy array ("bfloat16" returns a
                 `ronde.Bfloat16`), a PyTorch type for a PyTorch tensor
        device -- the number of a GPU: returns a `ronde.GpuArray` there, which a sidecar started with `--gpu` reads in
                 place; `dtype` is a name or a NumPy type then. For PyTorch see `ronde.torch.gpu_pool`

        Raises ValueError for another type or an invalid shape; RefusedError with cause "limit" if shared memory is full
        (`--arena-mb`); RondeError with cause "device" without a GPU or its memory; and the session's error if it is
        over.
        """
        if device is not None:
            return GpuArray(shape, dtype, device)
        nbytes, view = viewer_of(dtype, shape)
        if self._replay is not None:
            return view(self._replay.call(lambda session: session.empty(nbytes)))
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

    def membership_change(self) -> MembershipChange | None:
        """Returns the last announced change of an elastic job's membership, once; None if there is no unread one.

        The worker should end the epoch soon: close the client and connect again, which waits for the next membership.
        `ronde.elastic` does so at the next commit.
        """
        change = self._session.membership_change()
        return None if change is None else MembershipChange(*change)

    @property
    def is_open(self) -> bool:
        """Whether operations can be submitted: the client is not closed and its epoch is not over.

        With on_failure="continue": whether the client is not closed and could continue after each loss.
        """
        return self._session.is_open if self._replay is None else self._replay.can_continue

    @property
    def shared_memory(self) -> SharedMemory:
        """This worker's current use of shared memory; zeros when the client is closed."""
        return SharedMemory(*self._session.shared_memory())

    @property
    def gpu_levels(self) -> GpuLevels:
        """What this client has done on GPUs in two levels so far; zeros when the client is closed."""
        return GpuLevels(*self._session.level_counts())

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
            self._close(f"{kind.__name__}: {error}"[:_REASON_LENGTH_MAX])
