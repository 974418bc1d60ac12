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
Sum = 1
Adasum = 2
Min = 3
Max = 4
Product = 5

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

    What is not given comes from the environment, as `ronde run` sets it: RONDE_SOCKET (the sidecar's session
    directory), RONDE_JOB, RONDE_RANK, RONDE_TOKEN_FILE, RONDE_CONNECT_TIMEOUT, RONDE_START_TIMEOUT and
    RONDE_OPERATION_TIMEOUT. Timeouts are in seconds. `inline` sends small tensors inside messages instead of through
    shared memory.
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
        """The reduction of all ranks' tensors, on every rank; written into `out` when that is given."""
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
        """`allreduce` that returns a handle as soon as the tensor's bytes have been taken."""
        return self._submit(
            "allreduce", tensor, out, name=name, op=op, prescale=prescale_factor, postscale=postscale_factor
        )

    def allgather(self, tensor: Any, name: str | None = None) -> Any:
        """All ranks' tensors, one after the other along the first dimension, in which they may differ."""
        return self.allgather_async(tensor, name).wait()

    def allgather_async(self, tensor: Any, name: str | None = None) -> Handle:
        """`allgather` that returns a handle as soon as the tensor's bytes have been taken."""
        return self._submit("allgather", tensor, None, name=name)

    def broadcast(self, tensor: Any, root_rank: int, name: str | None = None, *, out: Any = None) -> Any:
        """The tensor of rank `root_rank`, on every rank; shapes and types must be the same on all."""
        return self.broadcast_async(tensor, root_rank, name, out=out).wait()

    def broadcast_async(self, tensor: Any, root_rank: int, name: str | None = None, *, out: Any = None) -> Handle:
        """`broadcast` that returns a handle as soon as the tensor's bytes have been taken."""
        if not 0 <= root_rank < self.size:
            raise ValueError(f"invalid root rank {root_rank}: the job has {self.size} ranks, counted from 0")
        return self._submit("broadcast", tensor, out, name=name, root=root_rank)

    def barrier(self, name: str | None = None) -> None:
        """Returns when every rank has called it."""
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
        """The result; may be called again. Raises TimeoutError after `timeout` seconds: the operation then goes on."""
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
