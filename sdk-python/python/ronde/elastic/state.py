"""States of a training that are saved, restored, and synchronized on all ranks."""

from __future__ import annotations

import queue
from typing import Any, Callable


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed, so the training restarts with its current state.

    skip_sync -- whether the remaining ranks already have the same state, because hosts were only removed
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the hosts of the job have changed; the training goes on with its present state")
        self.skip_sync = skip_sync


class HostUpdateResult:
    """How hosts have changed, as bits: `removed | added` is `mixed`."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


class State:
    """The state of a training. A subclass implements how to save, restore and synchronize it.

    bcast_object -- broadcasts the object of rank 0 to all ranks
    get_rank     -- this worker's rank
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object = bcast_object
        self._rank = get_rank
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []
        self._commits = 0

    @property
    def commits(self) -> int:
        """The number of commits."""
        return self._commits

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Adds callbacks. They run in order after the session restarts, before the state is synchronized."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Resets the state and runs the callbacks after the session restarts."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Notes on rank 0 that the hosts have changed. The next commit notifies all ranks. May be called in any thread.

        update_res -- of `HostUpdateResult`
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves the state, which a failure restores, and checks whether the hosts have changed."""
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks at once, if rank 0 was notified that the hosts have changed."""
        previous = latest = self._last_updated_timestamp
        changes = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                changes |= change
        previous, self._last_updated_timestamp, changes = self._bcast_object((previous, latest, changes))
        if self._last_updated_timestamp > previous:
            raise HostsUpdatedInterrupt(changes == HostUpdateResult.removed)

    def save(self) -> None:
        """Saves the current state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restores the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcasts the state of rank 0 to all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """Runs after the session restarts; does nothing by default."""


class ObjectState(State):
    """A state of plain objects, which are its attributes. Attributes that are added later are not part of it.

    Saving makes no copies: an object that is changed in place changes in the saved state, too.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = dict(kwargs)
        self._show()

    def save(self) -> None:
        """Saves the current state in memory."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Restores the state that was saved last."""
        self._show()

    def sync(self) -> None:
        """Broadcasts the state of rank 0 to all ranks."""
        if self._saved_state:
            ObjectState.save(self)
            self._saved_state = self._bcast_object(self._saved_state)
            self._show()

    def _show(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)
