"""The callbacks of elastic training, without their base class."""

from __future__ import annotations

from typing import Any


class CommitStateCallback:
    """Commits the state after every `batches_per_commit` batches.

    With `steps_per_execution` of `compile`, Keras calls callbacks once for several batches. Then the state is committed
    after the first call with which at least `batches_per_commit` batches are complete. Releases of Keras that give the
    number of the first batch of a call, not that of the last one, count one batch for the first call of an epoch.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self._state, self._batches_per_commit = state, batches_per_commit
        self._uncommitted, self._last_batch = 0, -1

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts to count."""
        del logs
        self._uncommitted, self._last_batch = 0, -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commits, if it is time."""
        del logs
        if batch <= self._last_batch:
            # A new epoch, whose batches are counted from 0.
            self._last_batch = -1
        self._uncommitted += batch - self._last_batch
        self._last_batch = batch
        if 0 < self._batches_per_commit <= self._uncommitted:
            self._uncommitted = 0
            self._state.commit()


class UpdateBatchStateCallback:
    """Keeps the number of complete batches of the current epoch in `state.batch`.

    first_batch -- how many batches of the first epoch of `fit` were complete before it

    After a restart the program calls `fit` again, which begins the epoch again. `fit` takes the length of its epochs
    from its arguments alone: a program that leaves out complete batches passes `steps_per_epoch` and data without them
    for one epoch, and `first_batch=state.batch`, because Keras counts the batches of each `fit` from 0.
    """

    def __init__(self, state: Any, first_batch: int = 0) -> None:
        super().__init__()
        self._state = state
        self._first_batch = self._complete = first_batch

    def on_train_begin(self, logs: Any = None) -> None:
        """Starts to count from the first batch."""
        del logs
        self._complete = self._first_batch

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the batch."""
        del logs
        self._state.batch = self._complete + batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Starts to count again, from 0."""
        del epoch, logs
        self._state.batch = self._complete = 0


class UpdateEpochStateCallback:
    """Keeps the number of complete epochs in `state.epoch`.

    Call `fit` with `initial_epoch=state.epoch` and the number of all epochs. With the number of the remaining epochs
    alone, as in programs for Horovod, epochs are counted, too, but after a restart `fit` numbers them from 0 again:
    callbacks that depend on the epoch, such as those for the learning rate, start over.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._state = state
        self._complete = state.epoch
        self._first_epoch: int | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Notes how many epochs were complete before this call of `fit`."""
        del logs
        self._complete, self._first_epoch = self._state.epoch, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the number that `fit` gives its first epoch: that of `initial_epoch`, or 0."""
        del logs
        if self._first_epoch is None:
            self._first_epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Counts the epoch."""
        del logs
        self._state.epoch = self._complete + epoch - (self._first_epoch or 0) + 1
