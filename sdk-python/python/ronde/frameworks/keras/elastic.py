"""The callbacks of elastic training, without their base class, and how ranks agree without a framework."""

from __future__ import annotations

from typing import Any

import numpy

from ronde.elastic.state import ObjectState
from ronde.frameworks import basics, objects, process_sets, world
from ronde.ops import Max


class CommitStateCallback:
    """Commits the state after every `batches_per_commit` batches."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state, self._batches_per_commit = state, batches_per_commit
        self._remaining = batches_per_commit

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts to count."""
        del logs
        self._remaining = self._batches_per_commit

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits, if it is time."""
        del batch, logs
        self._remaining -= 1
        if self._remaining == 0:
            self._remaining = self._batches_per_commit
            self._state.commit()


class UpdateBatchStateCallback:
    """Keeps the number of batches of the current epoch in `state.batch`.

    After a restart, `fit` begins the epoch again with `steps_per_epoch` less that number: the first epoch is shorter.
    """

    params: dict[str, Any]

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state
        self._steps_per_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Resets the length of epochs."""
        del logs
        self._steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Shortens the first epoch after a restart."""
        del epoch, logs
        steps = self.params.get("steps")
        if steps:
            if self._steps_per_epoch is None:
                self._steps_per_epoch = steps
            self.params["steps"] = self._steps_per_epoch - self._state.batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the batch."""
        del logs
        self._state.batch = batch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Starts to count again."""
        del epoch, logs
        self._state.batch = 0


class UpdateEpochStateCallback:
    """Keeps the number of complete epochs in `state.epoch`."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state
        self._initial_epoch = state.epoch

    def on_train_begin(self, logs: Any = None) -> None:
        """Notes the first epoch of this call of `fit`."""
        del logs
        self._initial_epoch = self._state.epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts the epoch."""
        del logs
        self._state.epoch = self._initial_epoch + epoch + 1


class AgreeingState(ObjectState):
    """A state of plain objects, on the session of `init`. Ranks agree by small operations on arrays."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(_broadcast_of_rank_0, basics.rank, **kwargs)

    def agree_on_state(self, has_state: bool) -> bool:
        """Returns on all ranks whether rank 0, the oldest worker, has the state of the training."""
        if basics.size() == 1:
            return has_state
        flag = numpy.array([int(has_state)], dtype=numpy.int32)
        root = process_sets.root_of(0, process_sets.global_process_set)
        return bool(_client().broadcast(flag, root, "ronde.elastic.has_state", process_set=_members())[0])

    def agree_on_sync(self, needed: bool) -> bool:
        """Returns on all ranks whether any of them needs to synchronize."""
        if basics.size() == 1:
            return needed
        flag = numpy.array([int(needed)], dtype=numpy.int32)
        return bool(_client().allreduce(flag, Max, "ronde.elastic.needs_sync", process_set=_members())[0])

    def wait_for_all(self) -> None:
        """Waits until all ranks have called this."""
        if basics.size() > 1:
            _client().barrier("ronde.elastic.wait_for_all", process_set=_members())

    def _of_rank_0(self, previous: float, latest: float, changes: int) -> tuple[float, float, int]:
        if basics.size() == 1:
            return previous, latest, changes
        values = numpy.array([previous, latest, changes], dtype=numpy.float64)
        root = process_sets.root_of(0, process_sets.global_process_set)
        previous, latest, bits = _client().broadcast(values, root, "ronde.elastic.hosts", process_set=_members())
        return float(previous), float(latest), int(bits)


def _client() -> Any:
    return world.current().client


def _members() -> Any:
    return process_sets.members_of(process_sets.global_process_set)


def _broadcast_of_rank_0(obj: Any) -> Any:
    return objects.broadcast_object(obj, 0, "ronde.elastic.objects")
