"""The client: collectives on tensors of any library, blocking or in flight."""

from __future__ import annotations

import logging
import os
import time
import weakref
from typing import TYPE_CHECKING, Any

from ronde import _ronde
from ronde.tensors import Source, Target, source_of, target_of

if TYPE_CHECKING:
    from types import TracebackType

Average = 0
"""The sum divided by the number of ranks; of integers truncated toward zero. Not for bool."""
Sum = 1
"""The sum; integers wrap. Of bool: whether any is true."""
Adasum = 2
"""Adaptive summation. Has its number, but this version refuses it with RefusedError."""
Min = 3
"""The least element; NaN wins. Of bool: whether all are true."""
Max = 4
"""The greatest element; NaN wins. Of bool: whether any is true."""
Product = 5
"""The product; integers wrap. Of bool: whether all are true."""

_log = logging.getLogger("ronde")
_NOTICE_INTERVAL_S = 1.0


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

    Raises, with `cause`:
    RondeError    -- "settings": a setting is missing or wrong (all are told at once); "token": the token file cannot
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
    }
    settings = {name: str(value) for name, value in given.items() if value is not None}
    return Client(_ronde.Session.connect(settings, inline, f"ronde-python {_ronde.__version__}"))


class Client:
    """A worker's session with its sidecar. Made by `connect`; ends with `close` or as a context manager.

    Ranks agree on operations by name, in any order. Operations without a name are numbered in the order of their calls,
    which must then be the same on all ranks. Results are of the kind of the input: NumPy for NumPy, PyTorch for
    PyTorch, NumPy for everything else.
    """

    def __init__(self, session: _ronde.Session) -> None:
        self._session = session
        # Also when the program ends without a word: a session that just breaks counts as a lost rank.
        weakref.finalize(self, session.close)

    def allreduce(
        self,
        tensor: Any,
        op: int = Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        out: Any = None,
    ) -> Any:
        """The reduction of all ranks' tensors, element by element, on every rank.

        tensor          -- of type uint8, int8, uint16, int16, int32, int64, float16, bfloat16, float32, float64 or
                           bool; type and shape, op and scales are the same on all ranks
        op              -- Average, Sum, Min, Max or Product. The average of integers is truncated toward zero. Of bool,
                           Sum and Max are `or`, Product and Min are `and`, and Average is refused. Adasum is refused.
        name            -- what the ranks know the operation by; without one it gets a number in the order of calls
        prescale_factor, postscale_factor -- multiply each rank's tensor before the reduction and the result after it;
                           finite and not 0. Integers are multiplied as float64 and truncated toward zero, saturating.
        out             -- a NumPy array or PyTorch tensor of the same type and shape, for the result; may be `tensor`.
                           After an error its elements mean nothing.

        float16 and bfloat16 are accumulated in float32. A result has the type and shape of the input.

        Raises:
        ValueError     -- `tensor` is no dense tensor of these types, `out` does not fit, a scale is 0 or not finite,
                          `op` is no reduction, the name is too long; nothing was submitted
        MismatchError  -- types, shapes, ops or scales differ between ranks; on all ranks, and the job goes on
        RefusedError   -- Adasum, the average of bool, another rank gave the operation up, or (cause "limit") there is
                          no room for it; the job goes on
        TimedOutError  -- `operation_timeout` has passed
        PeerLostError  -- a worker or sidecar is lost: the epoch is over
        ShutDownError  -- another rank has left, or this client is closed
        RondeError     -- with another cause, such as "used_after_fork" in a forked child
        """
        handle = self.allreduce_async(tensor, op, name, prescale_factor, postscale_factor, out=out)
        return handle.wait()

    def allreduce_async(
        self,
        tensor: Any,
        op: int = Average,
        name: str | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        *,
        out: Any = None,
    ) -> Handle:
        """`allreduce` that returns a handle as soon as the tensor's bytes have been taken: it may be changed then.

        Arguments and rules are those of `allreduce`. `out` is written by `Handle.wait`, not before.

        Raises ValueError, RefusedError with cause "limit", and why the session is over, if it is. What befalls the
        operation later is raised by `Handle.wait`.
        """
        return self._submit(
            "allreduce", tensor, out, name=name, op=op, prescale=prescale_factor, postscale=postscale_factor
        )

    def allgather(self, tensor: Any, name: str | None = None) -> Any:
        """All ranks' tensors, one after the other along the first dimension, in the order of ranks.

        Tensors are of the types of `allreduce` and have the same type and dimensions on all ranks but for the first
        dimension, their rows, which may differ and be 0. The result is of shape (sum of all ranks' rows, *rest).

        Raises what `allreduce` does; MismatchError also for scalars, which have no first dimension.
        """
        return self.allgather_async(tensor, name).wait()

    def allgather_async(self, tensor: Any, name: str | None = None) -> Handle:
        """`allgather` that returns a handle as soon as the tensor's bytes have been taken.

        Raises what `allreduce_async` does.
        """
        return self._submit("allgather", tensor, None, name=name)

    def broadcast(self, tensor: Any, root_rank: int, name: str | None = None, *, out: Any = None) -> Any:
        """The tensor of rank `root_rank`, on every rank.

        root_rank -- from 0 to size - 1, the same on all ranks
        tensor    -- of the types of `allreduce`; type and shape are the same on all ranks
        out       -- as for `allreduce`

        Raises what `allreduce` does; ValueError also for a root out of range, MismatchError also for different roots.
        """
        return self.broadcast_async(tensor, root_rank, name, out=out).wait()

    def broadcast_async(self, tensor: Any, root_rank: int, name: str | None = None, *, out: Any = None) -> Handle:
        """`broadcast` that returns a handle as soon as the tensor's bytes have been taken.

        Raises ValueError for a root out of range, and what `allreduce_async` does.
        """
        if not 0 <= root_rank < self.size:
            raise ValueError(f"invalid root rank {root_rank}: the job has {self.size} ranks, counted from 0")
        return self._submit("broadcast", tensor, out, name=name, root=root_rank)

    def barrier(self, name: str | None = None) -> None:
        """Returns when every rank has called it with this name; without one, equally often.

        Does not wait for operations in flight. Raises what `allreduce` does, of tensors apart.
        """
        operation = self._session.submit("barrier", "uint8", (0,), 0, 0, name=name)
        Handle(self, operation, None, None).wait()

    def close(self) -> None:
        """Ends the session in order: the epoch ends for all ranks. Operations in flight fail."""
        self._session.close()

    @property
    def is_open(self) -> bool:
        """Whether operations can be submitted: the client is not closed and its epoch not over."""
        return self._session.is_open

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

    def log_notices(self) -> None:
        """Logs what the sidecar has to say to people, such as which rank is late. Waits do this by themselves."""
        for notice in self._session.take_notices():
            _log.warning("%s", notice)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, kind: str, tensor: Any, out: Any, **options: Any) -> Handle:
        source = source_of(tensor)
        target = None if out is None else target_of(out)
        if target is not None and (target.dtype, target.shape) != (source.dtype, source.shape):
            raise ValueError(
                f"out is of type {target.dtype} and shape {target.shape}, but the result will be of type "
                f"{source.dtype} and shape {source.shape}"
            )
        operation = self._session.submit(kind, source.dtype, source.shape, source.address, source.nbytes, **options)
        return Handle(self, operation, source, target)


class Handle:
    """An operation in flight. Dropping it withdraws the operation unless it is complete."""

    def __init__(
        self, client: Client, operation: _ronde.Operation, source: Source | None, target: Target | None
    ) -> None:
        self._client = client  # whose end would be the operation's
        self._operation = operation
        # The bytes have been taken; of the input only the way to make a result of its kind is kept.
        self._empty = None if source is None else source.empty
        self._target = target
        self._done = False
        self._result: Any = None
        self._error: Exception | None = None

    def poll(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done or self._operation.poll()

    def wait(self, timeout: float | None = None) -> Any:
        """The result, or None for a barrier; may be called again and then gives, or raises, the same.

        timeout -- how long to wait, in seconds; None for as long as it takes

        Raises TimeoutError after `timeout`: the operation goes on, and `wait` may be called again. Raises why the
        operation or the session failed as `Client.allreduce` does; also ShutDownError when the result lies in shared
        memory and the client was closed before this call, which is what reads it.
        """
        if not self._done:
            self._wait(timeout)
        if self._error is not None:
            raise self._error
        return self._result

    def _wait(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _NOTICE_INTERVAL_S if deadline is None else max(0.0, deadline - time.monotonic())
            if self._operation.wait(min(left, _NOTICE_INTERVAL_S)):
                break
            self._client.log_notices()
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self._operation.name} is still in flight after {timeout} s")
        try:
            self._result = self._read()
        except Exception as error:
            self._error = error
        finally:
            self._done = True
            self._target = None

    def _read(self) -> Any:
        shape = self._operation.shape()
        if self._empty is None:
            return None
        target = self._empty(shape) if self._target is None else self._target
        self._operation.read_into(target.address, target.nbytes)
        return target.finish()
