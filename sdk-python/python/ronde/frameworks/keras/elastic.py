"""The callbacks of elastic training, without their base class."""

from __future__ import annotations

from typing import Any


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
