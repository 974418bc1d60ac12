"""The retry loop around a function, which restores the state's last commit when a collective fails."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, Callable, TypeVar

from ronde.elastic.notification import notification_manager
from ronde.elastic.state import HostsUpdatedInterrupt
from ronde.errors import PeerLostError, RondeError

if TYPE_CHECKING:
    from ronde.elastic.state import State

# A function that fails so often without a commit in between will not succeed.
RESETS_MAX = 10

Result = TypeVar("Result")
_log = logging.getLogger("ronde.elastic")


def run_fn(func: Callable[..., Result], reset: Callable[[], None]) -> Callable[..., Result]:
    """Wraps the function `func(state, *args, **kwargs)` in the loop.

    Before each call the state is synchronized on all ranks. When a collective fails, the last commit of the state is
    restored; on HostsUpdatedInterrupt the state is kept. Then `reset` restarts the session, and the loop calls the
    state's callbacks and the function again. While the loop runs, the state is a listener of `notification_manager`.

    A job's ranks are fixed, and a lost rank does not return. So the loop raises PeerLostError, a failure after which
    the session cannot restart, and the last one of 10 failures without a commit in between.
    """

    @functools.wraps(func)
    def wrapper(state: State, *args: Any, **kwargs: Any) -> Result:
        notification_manager.register_listener(state)
        try:
            return _repeat(lambda: func(state, *args, **kwargs), state, reset)
        finally:
            notification_manager.remove_listener(state)

    return wrapper


def _repeat(call: Callable[[], Result], state: State, reset: Callable[[], None]) -> Result:
    skip_sync, resets, commits = False, 0, state.commits
    while True:
        failure: RondeError | None = None
        try:
            if not skip_sync:
                state.sync()
            return call()
        except PeerLostError:
            raise
        except RondeError as error:
            resets = resets + 1 if state.commits == commits else 1
            commits = state.commits
            if resets > RESETS_MAX:
                raise
            _log.warning("restoring the last commit, because a collective failed: %s", error)
            failure, skip_sync = error, False
            state.restore()
        except HostsUpdatedInterrupt as interrupt:
            skip_sync = interrupt.skip_sync
        _begin_again(reset, failure)
        state.on_reset()


def _begin_again(reset: Callable[[], None], failure: RondeError | None) -> None:
    """Restarts the session. If that fails, raises the failure that made it necessary."""
    try:
        reset()
    except RondeError as error:
        if failure is None:
            raise
        raise failure from error
