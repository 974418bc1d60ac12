"""Operations in flight: bounded in number, and finished in order by waiting threads or a background thread.

The operations of a group form a lane. All ranks call them in the same order, so when one is complete, those before it
will be. A thread that waits for one finishes those before it first: after a wait, the results of all earlier ones are
in their tensors, and nothing is written there later.

A thread of the completer finishes operations that no thread waits for as soon as they are complete. The native client
counts completions of operations that no thread waits for, and wakes that thread.
"""

from __future__ import annotations

import atexit
import collections
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ronde import _ronde
    from ronde.torch.distributed.work import Operation

# Operations of a lane that are submitted at once; later ones follow when earlier ones are finished.
IN_FLIGHT_MAX = 16
# The limit for bytes of their inputs, unless there is a single one.
IN_FLIGHT_BYTES_MAX = 512 << 20
# How long the completer waits for completions before it checks for operations whose timeout has passed.
_POLL_INTERVAL_S = 1.0
# How long the end of the program waits for a callback that runs in the completer.
_CLOSE_TIMEOUT_S = 1.0


class Lane:
    """Operations that are finished in the order in which they were added."""

    def __init__(self, completer: Completer) -> None:
        self._completer = completer
        # Held while operations are added, submitted and removed, never during a wait.
        self._state = threading.Lock()
        self._operations: collections.deque[Operation] = collections.deque()
        self._submitted = 0  # of these, counted from the oldest
        self._bytes = 0  # of their inputs
        # Held by the thread that finishes operations.
        self._driver = threading.Lock()
        self._is_poll_requested = False

    def add(self, operation: Operation, notify: bool) -> None:
        """Submits an operation, or queues it until earlier ones are finished. Never waits for any of them.

        notify -- whether the completer finishes it if no thread waits for it

        Raises errors of the submission; if it was queued, the wait for the operation raises them.
        """
        with self._state:
            is_room = self._submitted == len(self._operations) and self._has_room(operation)
            if is_room:
                operation.submit(notify)
                self._count(operation)
            self._operations.append(operation)
        if notify or not is_room:
            self.watch()

    def _has_room(self, operation: Operation) -> bool:
        if self._submitted == 0:
            return True
        return self._submitted < IN_FLIGHT_MAX and self._bytes + operation.nbytes <= IN_FLIGHT_BYTES_MAX

    def _count(self, operation: Operation) -> None:
        self._submitted += 1
        self._bytes += operation.nbytes

    def watch(self) -> None:
        """Makes the completer finish operations that no thread waits for."""
        self._completer.watch(self)

    def is_empty(self) -> bool:
        """Returns whether all operations are finished."""
        return not self._operations

    def complete(self, target: Operation, until: float) -> bool:
        """Finishes operations up to `target`, in order.

        until -- when to stop waiting, of the monotonic clock; an operation whose timeout has passed then is given up

        Returns False if `target` is still in flight.
        """
        completed: list[Operation] = []
        try:
            while not target.is_done:
                # Another thread that holds the lock finishes operations itself, perhaps this one at the last moment.
                if not self._driver.acquire(timeout=max(0.0, until - time.monotonic())):
                    return target.is_done
                try:
                    if not self._drive(target, until, completed):
                        return False
                finally:
                    self._driver.release()
        finally:
            self._completer.publish([operation for operation in completed if operation is not target])
            if self._operations:
                self.advance()
        return True

    def _drive(self, target: Operation, until: float, completed: list[Operation]) -> bool:
        while not target.is_done:
            head = self._operations[0]
            if head.complete(min(until, head.deadline)):
                completed.append(self._remove_head())
            elif time.monotonic() >= target.deadline:
                target.give_up()
            else:
                return False
        return True

    def abort(self, error: Exception) -> None:
        """Fails all operations in flight, and those that are queued."""
        with self._state:
            operations = list(self._operations)
        for operation in operations:
            operation.abort(error)
        self.advance()

    def advance(self) -> None:
        """Finishes complete operations, unless another thread does so."""
        self._completer.publish(self.collect())

    def collect(self) -> list[Operation]:
        """Finishes complete operations, unless another thread does so. Returns them, to be published."""
        completed: list[Operation] = []
        while self._try_to_drive():
            try:
                while self._operations and self._operations[0].is_ready():
                    if self._operations[0].complete(time.monotonic()):
                        completed.append(self._remove_head())
            finally:
                self._driver.release()
            if not self._is_poll_requested:
                break
        return completed

    def _try_to_drive(self) -> bool:
        """Takes the driver's lock, or sets a flag for its holder to poll for complete operations again."""
        if not self._driver.acquire(blocking=False):
            self._is_poll_requested = True
            # A holder that released the lock before the flag was set has not seen it.
            if not self._driver.acquire(blocking=False):
                return False
        self._is_poll_requested = False
        return True

    def _remove_head(self) -> Operation:
        """Removes a finished operation, and submits queued ones."""
        with self._state:
            head = self._operations.popleft()
            self._submitted -= 1
            self._bytes -= head.nbytes
            while self._submitted < len(self._operations):
                following = self._operations[self._submitted]
                if not self._has_room(following):
                    break
                try:
                    following.submit(True)
                except Exception as error:  # raised by the wait for it
                    following.fail(error)
                self._count(following)
        return head


class Completer:
    """Threads that finish operations that no other thread waits for.

    One of them is the leader: it parks until operations complete, and finishes them. Completing a future runs
    callbacks, which may wait for other operations and futures. So before a thread completes a future, it makes another
    one the leader, if there is anything left to do.

    completions -- counts completions of operations that no thread waits for
    """

    def __init__(self, completions: _ronde.Completions) -> None:
        self._completions = completions
        self._lanes: dict[Lane, None] = {}
        self._futures: collections.deque[Operation] = collections.deque()  # operations whose futures are due
        self._changed = threading.Condition()
        self._is_led = False
        self._spares = 0  # threads that wait to become the leader
        self._is_closed = False
        self._threads: list[threading.Thread] = []
        # Threads that are still in the native client when the interpreter ends would end the process with an error.
        atexit.register(self.close)

    def watch(self, lane: Lane) -> None:
        """Finishes operations of a lane until it is empty. Cheap if the lane is watched already."""
        if lane in self._lanes and self._is_led:
            return
        with self._changed:
            self._lanes[lane] = None
            self._find_leader()

    def publish(self, completed: list[Operation]) -> None:
        """Completes the futures of operations that another thread has finished."""
        futures = [operation for operation in completed if operation.has_future()]
        if not futures:
            return
        with self._changed:
            self._futures.extend(futures)
            self._find_leader()
        self._completions.wake()

    def close(self) -> None:
        """Ends the threads. Waiting threads finish operations that are in flight."""
        atexit.unregister(self.close)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._completions.wake()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_CLOSE_TIMEOUT_S)

    def _find_leader(self) -> None:
        """Makes a thread the leader if there is none and there is work. Called with the lock held."""
        if self._is_led or self._is_closed or not (self._lanes or self._futures):
            return
        if self._spares > 0:
            self._changed.notify()
            return
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=self._run, name="ronde-completer", daemon=True)
        self._is_led = True
        self._threads.append(thread)
        thread.start()

    def _run(self) -> None:
        """Runs a thread, which starts as the leader."""
        while (operation := self._lead()) is not None:
            with self._changed:
                self._is_led = False
                self._find_leader()
            operation.publish()
            if not self._take_lead():
                return

    def _take_lead(self) -> bool:
        """Waits until there is no leader, and becomes it. Returns False if this thread must end."""
        with self._changed:
            if self._is_led and self._spares > 0:
                return False
            self._spares += 1
            self._changed.wait_for(lambda: not self._is_led or self._is_closed)
            self._spares -= 1
            if self._is_closed:
                return False
            self._is_led = True
            return True

    def _lead(self) -> Operation | None:
        """Finishes operations until there is one with a future. Returns that, or None if the completer is closed."""
        seen = self._completions.wait(0, 0.0)
        while not self._is_closed:
            for lane in list(self._lanes):
                self._futures.extend(operation for operation in lane.collect() if operation.has_future())
                if lane.is_empty():
                    self._forget(lane)
            if self._futures:
                return self._futures.popleft()
            seen = self._completions.wait(seen, _POLL_INTERVAL_S)
        return None

    def _forget(self, lane: Lane) -> None:
        """Stops watching a lane that is empty."""
        with self._changed:
            self._lanes.pop(lane, None)
            if not lane.is_empty():  # something was added meanwhile
                self._lanes[lane] = None
