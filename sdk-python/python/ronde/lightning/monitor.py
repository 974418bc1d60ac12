"""Puts the values of `ronde.monitor` into the loggers of a Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import Callback

from ronde.monitor import StepMonitor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning.pytorch import LightningModule, Trainer


class StepMonitorCallback(Callback):  # type: ignore[misc]
    """Logs step time, the shares of communication and waiting, and bytes, with each of the Trainer's loggers.

    every -- after how many batches values are logged, as means over these; default: the Trainer's `log_every_n_steps`

    A Trainer's loggers write on rank 0 only, so the values are those of rank 0. Validation is no part of a step.
    """

    def __init__(self, every: int | None = None) -> None:
        self._every = every
        self._monitor: StepMonitor | None = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins the first step of an epoch: what was between two epochs is no part of it."""
        every = max(1, int(getattr(trainer, "log_every_n_steps", 1))) if self._every is None else self._every
        self._monitor = StepMonitor(_Loggers(trainer), every=every)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Ends a step."""
        if self._monitor is not None:
            self._monitor.step()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stops measuring: validation runs within a training epoch, before its end or between its batches."""
        if self._monitor is not None:
            self._monitor.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continues measuring."""
        if self._monitor is not None:
            self._monitor.resume()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the steps since the last report."""
        if self._monitor is not None:
            self._monitor.report()


class _Loggers:
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Writes with all loggers, at the step that Lightning has reached."""
        for logger in self._trainer.loggers:
            logger.log_metrics(dict(values), step=self._trainer.global_step)
