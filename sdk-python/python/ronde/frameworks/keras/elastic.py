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
