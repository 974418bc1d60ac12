"""States of a training run that are saved, restored, and synchronized on all ranks."""

from __future__ import annotations

import contextlib
import queue
from typing import Any, Callable

from ronde.elastic.membership import is_elastic
from ronde.elastic.notification import notification_manager
from ronde.errors import RondeError

try:  # Where it is installed, objects are sent by cloudpickle.
    import cloudpickle as _pickle
except ImportError:
    import pickle as _pickle


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of the job have changed, so the training restarts with its current state.

    skip_sync     -- whether the remaining ranks already have the same state, because hosts were only removed
    keeps_session -- whether the session is that of the new membership already, because it has replayed operations that
                     the loss of a rank had interrupted (on_failure="continue")
    """

    def __init__(self, skip_sync: bool = False, keeps_session: bool = False) -> None:
        super().__init__("the hosts of the job have changed; the training goes on with its present state")
        self.skip_sync = skip_sync
        self.keeps_session = keeps_session


class StateCorruptError(RuntimeError):
    """This rank received other bytes of the state than another rank sent, so memory or a program is faulty.

    In an elastic job the other ranks continue when the program of this one has ended.

    rank   -- this rank
    source -- the rank that sent the bytes
    names  -- the tensors that they belong to, as text
    """

    def __init__(self, rank: int, source: int, names: str) -> None:
        super().__init__(
            f"rank {rank} has received other bytes of the state than rank 0 has, from rank {source}: {names}. The "
            "memory of one of their hosts may be faulty, or the program of one changes its state while it is handed "
            "over"
        )


class HostUpdateResult:
    """How hosts have changed, as bits: `removed | added` is `mixed`."""

    no_update = 0
    removed = 1
    added = 2
    mixed = 3


# A change in addition to those of `HostUpdateResult`, as a bit.
_REPLAYED = 4


class State:
    """The state of a training run. A subclass implements how to save, restore and synchronize it.

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
        self._replays = notification_manager.replays

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
        # It was that of rank 0's clock, and another host with an earlier clock may have rank 0 now.
        self._last_updated_timestamp = 0.0
        self._replays = notification_manager.replays
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
        """Raises HostsUpdatedInterrupt on all ranks at once, if rank 0 was notified that the hosts have changed.

        With on_failure="continue" it also does so if another rank was, and if operations were replayed since the last
        call of the function. All ranks call it equally often, as they do `commit`.
        """
        notification_manager.poll()
        previous = latest = self._last_updated_timestamp
        changes = HostUpdateResult.no_update
        while not self._host_messages.empty():
            timestamp, change = self._host_messages.get()
            if timestamp > latest:
                latest = timestamp
                changes |= change
        if self._replays_operations():
            self._last_updated_timestamp = latest
            replayed = _REPLAYED if notification_manager.replays != self._replays else 0
            changes = self._of_all_ranks(changes | replayed)
            is_updated = bool(changes & HostUpdateResult.mixed)
        else:
            previous, self._last_updated_timestamp, changes = self._of_rank_0(previous, latest, changes)
            is_updated = self._last_updated_timestamp > previous
        if is_updated:
            if is_elastic():
                # The first rank that leaves ends the epoch, so all of them must have received this.
                with contextlib.suppress(RondeError):
                    self.wait_for_all()
            raise HostsUpdatedInterrupt(changes & HostUpdateResult.mixed == HostUpdateResult.removed)
        if changes & _REPLAYED:
            raise HostsUpdatedInterrupt(skip_sync=True, keeps_session=True)

    def agree_on_state(self, has_state: bool) -> bool:
        """Returns on all ranks whether rank 0, the oldest worker, has the state of the training."""
        return bool(self._bcast_object(has_state))

    def agree_on_sync(self, needed: bool) -> bool:
        """Returns whether to synchronize before the next call of the function, the same on all ranks.

        needed -- whether this rank needs it: it is new, or has restored a commit

        `run_fn` calls it in elastic jobs, where new workers may arrive with any membership. This method returns True; a
        subclass may ask the other ranks.
        """
        del needed
        return True

    def wait_for_all(self) -> None:
        """Waits until all ranks have called this."""
        self._bcast_object(None)

    def _replays_operations(self) -> bool:
        """Returns whether the session replays operations that the loss of a rank interrupts; false by default."""
        return False

    def _of_all_ranks(self, changes: int) -> int:
        """Returns the changes of all ranks together, as bits. The loss of any rank must not keep it from completing."""
        return changes

    def _of_rank_0(self, previous: float, latest: float, changes: int) -> tuple[float, float, int]:
        """Returns the values of rank 0 on all ranks."""
        values: tuple[float, float, int] = self._bcast_object((previous, latest, changes))
        return values

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
        """Broadcasts the state of rank 0 to all ranks.

        Raises ValueError on all ranks if rank 0 has a value that cannot be pickled; the error names the attribute.
        """
        if self._saved_state:
            ObjectState.save(self)
            self._saved_state = self._broadcast(self._saved_state)
            self._show()

    def _broadcast(self, values: dict[str, Any]) -> dict[str, Any]:
        try:
            received = self._bcast_object(values)
        except RondeError:
            raise
        except Exception:
            refusal = _refusal(values) if self._rank() == 0 else None
            if refusal is None:
                raise
            # Nothing was sent: rank 0 pickles first. The other ranks still wait for its values.
            received = self._bcast_object(refusal)
        if isinstance(received, _Refusal):
            raise ValueError(received.text)
        return dict(received)

    def _show(self) -> None:
        for name, value in self._saved_state.items():
            setattr(self, name, value)


class _Refusal:
    """Sent instead of values that cannot be pickled.

    text -- which one, why, and what to do
    """

    def __init__(self, text: str) -> None:
        self.text = text


def _refusal(values: dict[str, Any]) -> _Refusal | None:
    """Returns the reason why values cannot be pickled; None if each of them can."""
    for name, value in values.items():
        try:
            _pickle.dumps(value)
        except Exception as error:
            return _Refusal(
                f"the attribute {name} of the state cannot be sent to other ranks, because pickle rejects it "
                f"({type(error).__name__}: {error}). Keep in the state what pickle accepts, such as a number or a "
                f"state_dict(), and create the {type(value).__name__} from it in a reset callback"
            )
    return None
