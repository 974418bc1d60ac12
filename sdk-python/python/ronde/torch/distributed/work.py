"""Operations in flight, as `torch.distributed` waits for them."""

from __future__ import annotations

import contextlib
import datetime
import queue
import threading
from typing import TYPE_CHECKING, Any, Callable

import torch
from torch._C._distributed_c10d import Work

from ronde.errors import TimedOutError

if TYPE_CHECKING:
    from ronde.handle import GroupHandle, Handle

_NO_TIMEOUT = datetime.timedelta(0)


class Operation(Work):
    """An operation in flight.

    finish      -- makes the results of what the handle gives
    timeout     -- after which a wait gives the operation up
    completions -- who reads it where a future is asked for
    ended       -- told when it is complete

    Whoever waits reads the result by itself. Where a future is asked for, as DistributedDataParallel does, a thread
    that all operations share reads it.
    """

    def __init__(
        self,
        handle: Handle | GroupHandle,
        finish: Callable[[Any], Any],
        timeout: datetime.timedelta,
        completions: Completions,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._ended = ended
        self._handle: Handle | GroupHandle | None = handle
        self._finish = finish
        self._timeout = timeout
        self._completions = completions
        self._lock = threading.Lock()
        self._results: Any = None
        self._error: Exception | None = None
        self._settled: Any = None
        self._future: Any = None

    def complete(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> Any:
        """The results, once they are there.

        Raises why there are none, and TimedOutError, which gives the operation up.
        """
        with self._lock:
            if self._handle is not None:
                self._read(self._handle, (timeout if timeout > _NO_TIMEOUT else self._timeout).total_seconds())
                self._handle = None
                self._ended()
            if self._error is not None:
                raise self._error
            return self._results

    def _read(self, handle: Handle | GroupHandle, seconds: float) -> None:
        try:
            self._results = self._finish(handle.wait(seconds))
        except TimeoutError as error:
            self._error = TimedOutError(f"{error}, the timeout of its process group", "operation")
        except Exception as error:
            self._error = error

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """True when the operation is complete. Raises what `complete` does."""
        if self._settled is not None:
            self._settled.wait()  # who completes it holds the lock meanwhile
        self.complete(timeout)
        return True

    def await_end(self) -> None:
        """Returns when the operation is complete, or has failed, which those hear who wait for it."""
        with contextlib.suppress(Exception):
            self.wait()

    def synchronize(self) -> None:
        """`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        handle = self._handle
        return handle is None or (self._settled is None and handle.poll())

    def is_success(self) -> bool:
        """Whether it is complete and has not failed."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Why it failed; None while it is in flight and when it has not."""
        if self.is_completed() and self._handle is not None:
            try:
                self.complete()
            except Exception as error:
                return error
        return self._error

    def result(self) -> Any:
        """The results, once they are there. Raises what `wait` does."""
        return self.complete()

    def get_future(self) -> Any:
        """A future of the results."""
        if self._settled is None:
            self._settled = torch.futures.Future()
            # Why it failed is raised by a callback: for C++ a future that Python gives an exception has a result.
            self._future = self._settled.then(lambda settled: self.complete())
            self._completions.complete(self)
        return self._future

    def settle(self) -> None:
        """Completes the future that was asked for."""
        with contextlib.suppress(Exception):  # the future raises it
            self.complete()
        self._settled.set_result(None)


class Completions:
    """A thread that waits for operations in the order in which their futures were asked for."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def complete(self, operation: Operation) -> None:
        """Completes the future of an operation when it is complete."""
        if self._thread is None:
            # Of operations that end with the session, at the latest, so nobody needs to wait for it.
            self._thread = threading.Thread(target=self._run, name="ronde-futures", daemon=True)
            self._thread.start()
        self._waiting.put(operation)

    def close(self) -> None:
        """Ends the thread behind what it was given."""
        if self._thread is not None:
            self._waiting.put(None)

    def _run(self) -> None:
        while (operation := self._waiting.get()) is not None:
            operation.settle()
