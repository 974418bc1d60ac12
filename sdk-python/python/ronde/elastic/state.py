"""What a training goes back to: states that are saved, restored, and made the same on all ranks."""

from __future__ import annotations

import queue
from typing import Any, Callable


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed, so that the training begins again with its present state.

    skip_sync -- whether the ranks that are left have the same state already: hosts were only removed
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
    """What a training has reached. A subclass says how it is saved, restored and made the same on all ranks.

    bcast_object -- gives the object of rank 0 to all ranks
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
        """How often the state was committed."""
        return self._commits

    def register_reset_callbacks(self, callbacks: list[Callable[[], None]]) -> None:
        """Has these called, in their order, when the session was begun anew, before the state is made the same."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """The session was begun anew."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """The hosts have changed, which rank 0 is told. The next commit tells all ranks. May be called in any thread.

        update_res -- of `HostUpdateResult`
        """
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Saves the state, to which a failure goes back, and looks whether the hosts have changed."""
        self.save()
        self._commits += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt, on all ranks at once, if rank 0 was told that the hosts have changed."""
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
        """Keeps the present state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Makes the state of rank 0 that of all ranks."""
        raise NotImplementedError

    def reset(self) -> None:
        """The session was begun anew; by default nothing depends on it."""


class ObjectState(State):
    """A state of plain objects, which are its attributes. Attributes that are added later are not part of it.

    Saving keeps the objects themselves: one that is changed in place is changed in what was saved, too.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        self._saved_state = dict(kwargs)
        self._show()

    def save(self) -> None:
        """Keeps the present state in memory."""
        self._saved_state = {name: getattr(self, name) for name in self._saved_state}

    def restore(self) -> None:
        """Goes back to what was saved last."""
        self._show()

    def sync(self) -> None:
        """Makes the state of rank 0 that of all ranks."""
        if self._saved_state:
            ObjectState.save(self)
            self._saved_state = self._bcast_object(self._saved_state)
            self._show()

    def _show(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)
