"""Operations in flight as PyTorch's `Work`."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Protocol

import torch
from torch._C._distributed_c10d import Work

from ronde.errors import RondeError, TimedOutError
from ronde.torch.distributed import streams
from ronde.torch.distributed.hooks import calling, current

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ronde.torch.distributed.progress import Lane

_NO_TIMEOUT = datetime.timedelta(0)
# How soon a thread that waits for an operation, or for a group's members, notices that another one aborts it.
ABORT_INTERVAL_S = 0.25


class InFlight(Protocol):
    """The methods that `Handle` and `GroupHandle` share."""

    def poll(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self, timeout: float | None = None) -> Any:
        """Waits for the result. Raises TimeoutError after `timeout` seconds, and the operation's error."""
        ...


class Call(NamedTuple):
    """An operation to submit.

    name   -- its name in errors
    nbytes -- the bytes of its input
    start  -- submits it; the argument is whether to count its completion if no thread waits for it
    finish -- writes the handle's result into the output tensors, and returns them
    begun  -- events of the caller's streams, for each GPU that holds results
    """

    name: str
    nbytes: int
    start: Callable[[bool], InFlight]
    finish: Callable[[Any], list[torch.Tensor]]
    begun: Mapping[torch.device, Any] = {}


class Operation(Work):
    """An operation of a lane. The lane finishes it: it reads its result or its error.

    timeout  -- after which the operation is given up
    deadline -- when that is, of the monotonic clock; default: counted from the construction
    """

    def __init__(self, lane: Lane, call: Call, timeout: datetime.timedelta, deadline: float | None = None) -> None:
        super().__init__()
        self.nbytes = call.nbytes
        self.is_done = False
        self.deadline = time.monotonic() + timeout.total_seconds() if deadline is None else deadline
        self._timeout_s = timeout.total_seconds()
        self._lane = lane
        self._name = call.name
        # Dropped as soon as they are done, because they hold tensors.
        self._start: Callable[[bool], InFlight] | None = call.start
        self._finish: Callable[[Any], list[torch.Tensor]] | None = call.finish
        self._handle: InFlight | None = None
        self._begun = call.begun
        self._results: list[torch.Tensor] = []
        # After what writes the results on GPUs.
        self._arrived: Mapping[torch.device, Any] = {}
        self._error: Exception | None = None
        self._abortion: Exception | None = None  # set by another thread than the one that drives the lane
        self.keeper: dict[Operation, None] | None = None  # what keeps it alive until somebody waits for it
        self.source: int | None = None  # the sender of a message from any rank
        # Calls of the future's callbacks belong to the same hook as the operation.
        self._calls = current()
        # The future, if requested, and whether it has been completed.
        self._lock = threading.Lock()
        self._promise: Any = None
        self._future: Any = None
        self._is_published = False

    def submit(self, notify: bool) -> None:
        """Submits it. Raises errors of the submission."""
        if self._abortion is not None:
            raise self._abortion
        if self._start is not None:
            self._handle = self._start(notify)
            self._start = None

    def is_ready(self) -> bool:
        """Returns whether `complete` would finish it at once. Called by the thread that drives the lane."""
        handle = self._handle
        if self.is_done or handle is None:
            return self.is_done
        return handle.poll() or self._abortion is not None or time.monotonic() >= self.deadline

    def complete(self, until: float) -> bool:
        """Waits for the result and writes it. Returns False if it is not complete at `until`, of the monotonic clock.

        Called by the thread that drives the lane, and by no other at the same time.
        """
        handle, finish = self._handle, self._finish
        if handle is None or finish is None:
            return self.is_done
        try:
            result = self._waited(handle, until)
            # Copies to GPUs may be in progress when the operation counts as done: who waits for it orders its stream.
            with streams.finishing(self._begun):
                self._results = finish(result)
                self._arrived = streams.events_of(self._results)
        except TimeoutError:
            if time.monotonic() < self.deadline:
                return False
            self.give_up()
        except Exception as error:
            self.fail(error)
        else:
            self._end()
        return True

    def _waited(self, handle: InFlight, until: float) -> Any:
        """Waits for the result. Raises TimeoutError at `until`, and the error of `abort`."""
        while True:
            if self._abortion is not None and not handle.poll():
                raise self._abortion
            left = max(0.0, until - time.monotonic())
            try:
                return handle.wait(min(left, ABORT_INTERVAL_S))
            except TimeoutError:
                if left <= ABORT_INTERVAL_S and self._abortion is None:
                    raise

    def abort(self, error: Exception) -> None:
        """Makes the thread that drives the lane fail the operation, unless it is complete. Called by any thread."""
        self._abortion = error

    def give_up(self) -> None:
        """Fails it because its timeout has passed, and therefore on all other ranks."""
        self.fail(self._timed_out())

    def _timed_out(self) -> TimedOutError:
        text = f"{self._name} is still in flight after {self._timeout_s:g} s, the timeout of its process group"
        return TimedOutError(text, "operation")

    def fail(self, error: Exception) -> None:
        """Finishes it with an error."""
        # Without the traceback, whose frames would keep tensors alive as long as the error.
        self._error = error.with_traceback(None)
        self._end()

    def _end(self) -> None:
        # Dropping the handle withdraws an operation that is not complete.
        self._start = self._finish = self._handle = None
        self.is_done = True

    def has_future(self) -> bool:
        """Returns whether its future was requested."""
        return self._promise is not None

    def publish(self) -> None:
        """Completes the future, if it was requested and the operation is finished. Runs its callbacks.

        Returns when the future is complete, even if another thread completes it. Callbacks of other threads may still
        run then. Called without locks: a callback may wait for other operations.
        """
        with self._lock:
            if self._promise is None or not self.is_done:
                return
            is_first, self._is_published = not self._is_published, True
        if not is_first:
            # Complete before its callbacks run, so one that waits for this operation does not wait for itself.
            with contextlib.suppress(Exception):  # the operation's error, which the caller raises
                self._future.wait()
            return
        try:
            # Nothing orders the streams of those who read the future's value.
            streams.synchronize(self._arrived)
        except Exception as error:
            self._error = self._error or error.with_traceback(None)
        except BaseException as error:
            text = f"the wait for the results of {self._name} on the GPU was interrupted: {error!r}"
            self._error = self._error or RondeError(text, "operation")
            raise
        finally:
            # After a failure, too: otherwise those who wait for the future would wait for ever.
            with calling(self._calls):
                self._promise.set_result(None)

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """Waits until its results, and those of all earlier operations of its group, are written. Returns True.

        timeout -- after which TimedOutError is raised, and the operation continues; default: the group's timeout,
                   after which the operation is given up

        Raises the error if the operation failed.
        """
        seconds = timeout.total_seconds()
        until = time.monotonic() + seconds if seconds > 0 else self.deadline
        if not self._lane.complete(self, min(until, self.deadline)):
            if until >= self.deadline:
                # Another thread drives the lane, perhaps in the wait for an earlier operation: it fails this one later.
                error = self._timed_out()
                self.abort(error)
                raise error
            text = f"{self._name} is still in flight after {seconds:g} s, the timeout of this wait, and goes on"
            raise TimedOutError(text, "operation")
        self.publish()
        self._value()
        streams.order(self._arrived)
        return True

    def _value(self) -> list[torch.Tensor]:
        """Returns the results of a finished operation."""
        if self.keeper is not None:
            self.keeper.pop(self, None)
        if self._error is not None:
            raise self._error
        return self._results

    def synchronize(self) -> None:
        """Calls `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether its results are written or it has failed."""
        if not self.is_done:
            self._lane.advance()
        return self.is_done and streams.have_occurred(self._arrived)

    def is_success(self) -> bool:
        """Returns whether it is complete and has not failed."""
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        """Returns its error; None while it is in flight and if it has not failed."""
        return self._error if self.is_completed() else None

    def result(self) -> list[torch.Tensor]:
        """Waits for the results and returns them. Raises what `wait` does."""
        self.wait()
        return self._results

    def source_rank(self) -> int:
        """Returns the sender of a receive from any rank: its rank within the group."""
        if self.source is None:
            raise RuntimeError("only a receive from any rank, which is complete, has a source")
        return self.source

    _source_rank = source_rank

    def get_future(self) -> Any:
        """Returns a future of the results."""
        with self._lock:
            if self._promise is None:
                self._promise = torch.futures.Future()
                # A callback raises the error: for C++, a future that Python sets to an exception has a result.
                self._future = self._promise.then(lambda promise: self._value())
        self.publish()
        if not self.is_done:
            self._lane.watch()
        return self._future


class Together(Work):
    """Several operations as one, for `end_coalescing`."""

    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()
        self._operations = operations

    def wait(self, timeout: datetime.timedelta = _NO_TIMEOUT) -> bool:
        """Waits for all of them. Raises the first error, after all of them are complete."""
        errors = []
        for operation in self._operations:
            try:
                operation.wait(timeout)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return True

    def synchronize(self) -> None:
        """Calls `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns whether all are complete."""
        return all(operation.is_completed() for operation in self._operations)

    def is_success(self) -> bool:
        """Returns whether all are complete and none has failed."""
        return all(operation.is_success() for operation in self._operations)

    def exception(self) -> Exception | None:
        """Returns the first error; None while none has failed."""
        return next((error for each in self._operations if (error := each.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        """Waits for the results and returns them. Raises what `wait` does."""
        self.wait()
        return [result for operation in self._operations for result in operation.result()]

    def get_future(self) -> Any:
        """Returns a future of the results."""
        futures = torch.futures.collect_all([operation.get_future() for operation in self._operations])
        return futures.then(lambda done: [result for each in done.value() for result in each.value()])
