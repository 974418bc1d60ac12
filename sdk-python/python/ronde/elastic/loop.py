"""The retry loop around a function, which continues from the state's last commit when a collective fails."""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from ronde.elastic.membership import is_elastic, is_new_worker, is_removal
from ronde.elastic.notification import notification_manager
from ronde.elastic.preemption import notices_taken
from ronde.elastic.state import HostsUpdatedInterrupt
from ronde.errors import PeerLostError, RondeError, ShutDownError

if TYPE_CHECKING:
    from ronde.elastic.state import State

# A function that fails so often without a commit in between will not succeed.
RESETS_MAX = 10

Result = TypeVar("Result")
_log = logging.getLogger("ronde.elastic")


class RemovedFromJob(SystemExit):
    """The job continues without this worker, so its program ends with status 0."""

    def __init__(self) -> None:
        super().__init__(0)


class StateLostError(RuntimeError):
    """No worker has the state of the training any more: all that had it are gone."""

    def __init__(self) -> None:
        super().__init__(
            "all workers that had the state of the training are gone, and new workers do not have it; start the job "
            "again from a checkpoint on disk"
        )


Failures = Callable[[], contextlib.AbstractContextManager[Any]]


def run_fn(func: Callable[..., Result], reset: Callable[[], None]) -> Callable[..., Result]:
    """Wraps the function `func(state, *args, **kwargs)` in the loop.

    Before each call the state is synchronized on all ranks. When a collective fails, the last commit of the state is
    restored; on HostsUpdatedInterrupt the state is kept. Then `reset` restarts the session, unless the session has
    entered the next membership already, and the loop calls the state's callbacks and the function again. While the loop
    runs, the state is a listener of `notification_manager`.

    In an elastic job (`ronde run --min-np`) a lost rank is such a failure: `reset` waits for the job's next membership,
    in which older workers have the lower ranks. A worker that the job has removed ends with RemovedFromJob, a
    SystemExit with status 0. In other jobs a lost rank does not return, so the loop raises PeerLostError.

    While the function runs, SIGTERM is a notice that the host of this worker is about to be taken away: the worker
    trains on until its next commit, at which the job removes it. A program that handles SIGTERM itself keeps its
    handler.

    If all workers that had the state are gone, the loop raises StateLostError rather than train from the start.

    The loop also raises a failure after which the session cannot restart, and the last one of 10 failures without a
    commit in between.
    """
    return run_converted(func, reset, contextlib.nullcontext)


def run_converted(func: Callable[..., Result], reset: Callable[[], None], failures: Failures) -> Callable[..., Result]:
    """Wraps a function as `run_fn` does, for a framework with errors of its own.

    failures -- a context that converts a framework's errors of failed collectives to RondeError, those of the state too
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        notification_manager.register_listener(state)
        try:
            with notices_taken():
                result: Result = _Loop(lambda: func(state, *args, **kwargs), state, reset, failures).run()
            return result
        finally:
            notification_manager.remove_listener(state)

    return wrapper


class _Loop:
    """The calls of a function, and the failures between them."""

    def __init__(self, call: Callable[[], Result], state: State, reset: Callable[[], None], failures: Failures) -> None:
        self._call, self._state, self._reset, self._converted = call, state, reset, failures
        self._failures, self._commits = 0, state.commits
        self._has_state = not is_new_worker()

    def run(self) -> Any:
        needs_sync, is_first = True, True
        while True:
            failure: RondeError | None = None
            try:
                with self._converted():
                    result = self._attempt(needs_sync, is_first)
            except RondeError as error:
                self._check(error)
                failure, needs_sync = error, True
                self._state.restore()
            except HostsUpdatedInterrupt as interrupt:
                needs_sync = not interrupt.skip_sync
                if interrupt.keeps_session:
                    is_first = False
                    continue
            else:
                return result
            self._begin_again(failure)
            is_first = False

    def _attempt(self, needs_sync: bool, is_first: bool) -> Any:
        if not is_first:
            self._state.on_reset()
        if is_elastic():
            if not self._state.agree_on_state(self._has_state):
                raise StateLostError
            needs_sync = self._state.agree_on_sync(needs_sync)
        if needs_sync:
            self._state.sync()
        self._has_state = True
        result = self._call()
        self._finish()
        return result

    def _finish(self) -> None:
        """Waits until the function has ended on all ranks. The first one that leaves ends the epoch of all ranks."""
        if not is_elastic():
            return
        try:
            self._state.wait_for_all()
        except ShutDownError:
            # A rank has left after it waited for all ranks, this one included.
            _log.debug("another rank has ended its session after the function ended on all ranks")

    def _check(self, error: RondeError) -> None:
        """Raises a failure that a further call would not repair."""
        if isinstance(error, PeerLostError) and not is_elastic():
            raise error
        self._count(error)
        _log.warning("restoring the last commit, because a collective failed: %s", error)
        if not self._state.commits:
            _log.warning(
                "the state has no commit, so training restarts from its last synchronization; call state.commit() to "
                "keep progress"
            )

    def _count(self, error: RondeError) -> None:
        """Counts failures without a commit in between, and raises the first one too many."""
        has_commit = self._state.commits != self._commits
        self._failures = 1 if has_commit else self._failures + 1
        self._commits = self._state.commits
        if self._failures > RESETS_MAX:
            raise error

    def _begin_again(self, failure: RondeError | None) -> None:
        """Restarts the session. If that fails, raises the failure that made it necessary."""
        while True:
            try:
                self._reset()
            except RondeError as error:
                if is_removal(error):
                    _log.info("the job continues without this worker: %s", error)
                    raise RemovedFromJob from error
                if is_elastic() and isinstance(error, (PeerLostError, ShutDownError)):
                    self._count(error)
                    _log.warning("restarting the session again, because a rank was lost meanwhile: %s", error)
                    continue
                if failure is None:
                    raise
                raise failure from error
            return
