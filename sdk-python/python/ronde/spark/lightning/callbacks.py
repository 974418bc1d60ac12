"""Callbacks that estimators add to Lightning's Trainer."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Any

import lightning
import torch

import ronde.torch as hvd
from ronde.spark.lightning.modules import inner
from ronde.spark.torch import models
from ronde.spark.torch.models import BEGUN, EPOCH, MODEL, PLANNED

if TYPE_CHECKING:
    from ronde.spark.common.task import Task

OPTIMIZERS, SCHEDULERS = "optimizers", "schedulers"
"""The keys of a checkpoint besides those in `models`."""


class Run(lightning.Callback):  # type: ignore[misc]
    """Restores the run's state, records metrics, and writes checkpoints to the store on rank 0.

    task   -- the training
    state  -- of the run's checkpoint, or None
    folder -- for output, which is copied to the store
    """

    def __init__(self, task: Task, state: dict[str, Any] | None, folder: str) -> None:
        super().__init__()
        self._task, self._restored, self._folder = task, state, folder
        self.history: list[dict[str, Any]] = []
        self._epoch: int | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Gives optimizers and schedulers the states of the checkpoint. Raises ValueError if their number differs."""
        del pl_module
        if self._restored is None:
            return
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        for kind, objects in ((OPTIMIZERS, trainer.optimizers), (SCHEDULERS, schedulers)):
            states = self._restored[kind]
            if len(states) != len(objects):
                raise ValueError(
                    f"the checkpoint has {len(states)} {kind}, but the model {len(objects)}; use the model of that "
                    "run, or another run_id"
                )
            for mine, state in zip(objects, states):
                mine.load_state_dict(state)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Writes the checkpoint of the epoch before, and records its metrics.

        Lightning completes these, and steps the schedulers of epochs, only after `on_train_epoch_end`.
        """
        self._end_epoch(trainer, pl_module)
        self._epoch = trainer.current_epoch

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Writes the checkpoint of the last epoch, and records its metrics."""
        self._end_epoch(trainer, pl_module)

    def _end_epoch(self, trainer: Any, pl_module: Any) -> None:
        if self._epoch is None:
            return
        done = self._epoch + 1
        self._record(self._epoch, trainer)
        self._epoch = None
        remote = self._task.remote
        if hvd.rank() != 0 or not remote.saving_runs:
            return
        state = self.state(trainer, pl_module, done)
        with open(os.path.join(self._folder, remote.checkpoint_filename), "wb") as file:
            file.write(models.state_bytes(state))
        remote.sync(self._folder)

    def state(self, trainer: Any, model: Any, done: int) -> dict[str, Any]:
        """Returns the contents of a checkpoint after `done` epochs."""
        return {
            MODEL: {name: value.detach().cpu() for name, value in inner(model).state_dict().items()},
            OPTIMIZERS: [optimizer.state_dict() for optimizer in trainer.optimizers],
            SCHEDULERS: [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            EPOCH: done,
            BEGUN: self._task.begun_epoch,
            PLANNED: self._task.last_epoch,
        }

    def _record(self, epoch: int, trainer: Any) -> None:
        """Adds the averages over all ranks of what was logged in an epoch.

        What only some ranks have logged, as with `rank_zero_only`, is not averaged: this rank's own value counts.
        """
        own = {name: float(value) for name, value in sorted(trainer.callback_metrics.items())}
        everybodys = hvd.allgather_object(list(own), name="ronde.spark.metrics.names")
        names = sorted(set(own).intersection(*everybodys))
        if names:
            values = torch.tensor([own[name] for name in names], dtype=torch.float64)
            own.update(zip(names, hvd.allreduce(values, name="ronde.spark.metrics").tolist()))
        entry = {"epoch": epoch, **own}
        self.history.append(entry)
        if hvd.rank() == 0 and self._task.settings["verbose"] > 0:
            print(f"epoch {len(self.history) + self._task.first_epoch}/{self._task.last_epoch}: {entry}", flush=True)


class TerminateOnNan(lightning.Callback):  # type: ignore[misc]
    """Ends training when the loss of a batch, or a parameter after its step, is not finite."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Raises ValueError that names the loss or the parameter."""
        del trainer, batch
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        if loss is not None and not math.isfinite(float(loss)):
            raise ValueError(f"the loss of batch {batch_idx} is {float(loss)}, and terminate_on_nan is set")
        for name, parameter in pl_module.named_parameters():
            if not torch.isfinite(parameter).all():
                raise ValueError(f"parameter {name} is not finite after batch {batch_idx}; terminate_on_nan is set")
