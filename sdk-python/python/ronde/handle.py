"""Operations in flight."""

from __future__ import annotations

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
        self._log_notices = log_notices  # of the client, whose end would be the operation's
        self._operation = operation
        # The input's bytes have been taken; this knows how to make a result of its kind.
        self._read: Callable[[_ronde.Operation], Any] | None = read
        self._result: Any = None
        self._error: Exception | None = None

    def poll(self) -> bool:
        """Whether `wait` would return at once."""
        return self._read is None or self._operation.poll()

    def wait(self, timeout: float | None = None) -> Any:
        """What the call without `_async` returns; may be called again and then gives, or raises, the same.

        timeout -- how long to wait, in seconds; None for as long as it takes

        Raises TimeoutError after `timeout`: the operation goes on, and `wait` may be called again. Raises why the
        operation or the session failed as `Client.allreduce` does; also ShutDownError when the result is to be copied
        from shared memory and the client was closed before this call, which is what reads it.
        """
        if self._read is not None:
            self._wait(self._read, timeout)
        if self._error is not None:
            raise self._error
        return self._result

    def finish(self) -> None:
        """Waits until the operation is no longer in flight, and leaves its result unread, or why it failed."""
        if self._read is not None:
            self._wait(lambda operation: None, None)

    def _wait(self, read: Callable[[_ronde.Operation], Any], timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = _NOTICE_INTERVAL_S if deadline is None else max(0.0, deadline - time.monotonic())
            if self._operation.wait(min(left, _NOTICE_INTERVAL_S)):
                break
            self._log_notices()
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"{self._operation.name} is still in flight after {timeout} s")
        try:
            self._result = read(self._operation)
        except Exception as error:
            # Without the frames that lead here: they would keep the result's place alive as long as the error.
            self._error = error.with_traceback(None)
        finally:
            self._read = None


class MessageHandle(Handle):
    """A `recv` in flight. Dropping it withdraws the operation unless it is complete."""

    def __init__(
        self, log_notices: Callable[[], None], operation: _ronde.Operation, read: Callable[[_ronde.Operation], Any]
    ) -> None:
        # Not an attribute that the reader sets: a handle that refers to itself would outlive its last user.
        sources: list[int] = []

        def read_message(operation: _ronde.Operation) -> Any:
            sources.append(operation.source())
            return read(operation)

        super().__init__(log_notices, operation, read_message)
        self._sources = sources

    def source(self) -> int:
        """The rank of the job that sent the message; waits until it is complete.

        Raises why the operation failed, as `wait` does.
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
        """Waits until none of the operations is in flight, and leaves their results unread."""
        for handle in self._handles:
            handle.finish()

    def wait(self, timeout: float | None = None) -> list[Any]:
        """The results in the order of the tensors; may be called again.

        timeout -- how long to wait for all of them together, in seconds; None for as long as it takes

        Raises what `Handle.wait` does, for the first tensor that failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        results = []
        for handle in self._handles:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            results.append(handle.wait(left))
        return results
