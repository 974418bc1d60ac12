"""Handles of operations in flight."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde import _ronde

_NOTICE_INTERVAL_S = 1.0


class Handle:
    """An operation in flight. Dropping it withdraws the operation unless it is complete."""

    def __init__(
        self, log_notices: Callable[[], None], operation: _ronde.Operation, read: Callable[[_ronde.Operation], Any]
    ) -> None:
        self._log_notices = log_notices  # keeps the client alive, whose end would be the operation's
        self._operation = operation
        # Makes a result of the input's kind. The input's bytes have been copied already.
        self._read: Callable[[_ronde.Operation], Any] | None = read
        self._result: Any = None
        self._error: Exception | None = None
        # Held by the thread that waits for the operation and reads its result, which is possible once. Reentrant: a
        # handler of a signal may wait, too.
        self._waiting = threading.RLock()
        self._process = os.getpid()

    def poll(self) -> bool:
        """Whether `wait` would return at once."""
        return self._read is None or self._operation.poll()

    def wait(self, timeout: float | None = None) -> Any:
        """Returns what the call without `_async` returns. Further calls return, or raise, the same.

        timeout -- how long to wait, in seconds; None for no limit

        Raises TimeoutError after `timeout`: the operation continues, and `wait` may be called again. Raises errors of
        the operation or the session as `Client.allreduce` does. Also raises ShutDownError if this call would have to
        copy the result from shared memory and the client is closed already.
        """
        if self._read is not None:
            self._wait(self._read, timeout)
        if self._error is not None:
            raise self._error
        return self._result

    def finish(self) -> None:
        """Waits until the operation is no longer in flight. Reads no result and raises no error of it."""
        if self._read is not None:
            self._wait(lambda operation: None, None)

    def _wait(self, read: Callable[[_ronde.Operation], Any], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self._read is not None:
            left = _NOTICE_INTERVAL_S if deadline is None else max(0.0, deadline - time.monotonic())
            slice_s = min(left, _NOTICE_INTERVAL_S)
            if self._waiting.acquire(timeout=slice_s):
                try:
                    if self._operation.wait(slice_s):
                        self._finish(read)
                        return
                finally:
                    self._waiting.release()
            elif os.getpid() != self._process:
                self._operation.wait(0.0)  # raises: in a forked child no thread releases the lock
            self._log_notices()
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self._name()} is still in flight after {timeout} s")

    def _name(self) -> str:
        try:
            return self._operation.name
        except RuntimeError:
            return "an operation for which another thread waits, too,"

    def _finish(self, read: Callable[[_ronde.Operation], Any]) -> None:
        """Reads the result, unless another thread or the handler of a signal has done so meanwhile."""
        if self._read is None:
            return
        try:
            self._result = read(self._operation)
        except Exception as error:
            # Without the traceback, whose frames would keep the result's memory alive as long as the error.
            self._error = error.with_traceback(None)
        finally:
            self._read = None


class MessageHandle(Handle):
    """A `recv` in flight. Dropping it withdraws the operation unless it is complete."""

    def __init__(
        self, log_notices: Callable[[], None], operation: _ronde.Operation, read: Callable[[_ronde.Operation], Any]
    ) -> None:
        # Not an attribute that the reader sets: a handle that refers to itself would outlive its last reference.
        sources: list[int] = []

        def read_message(operation: _ronde.Operation) -> Any:
            sources.append(operation.source())
            return read(operation)

        super().__init__(log_notices, operation, read_message)
        self._sources = sources

    def source(self) -> int:
        """Waits until the operation is complete. Returns the rank of the job that sent the message.

        Raises the error if the operation failed, as `wait` does.
        """
        self.wait()
        return self._sources[0] if self._sources else self._operation.source()


class GroupHandle:
    """The operations of a group in flight. Dropping it withdraws those that are not complete."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def poll(self) -> bool:
        """Whether `wait` would return at once."""
        return all(handle.poll() for handle in self._handles)

    def finish(self) -> None:
        """Waits until none of the operations is in flight. Reads no results."""
        for handle in self._handles:
            handle.finish()

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Returns the results in the order of the tensors; may be called again.

        timeout -- how long to wait for all of them together, in seconds; None for no limit

        Raises what `Handle.wait` does, for the first tensor that failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        results = []
        for handle in self._handles:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            results.append(handle.wait(left))
        return results
