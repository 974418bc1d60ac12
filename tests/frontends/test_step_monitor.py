"""What `ronde.lightning.StepMonitorCallback` counts as a training step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import lightning
import torch
from lightning.pytorch.loggers import Logger
from ronde.lightning import StepMonitorCallback
from ronde.monitor import StepMonitor
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping

    import pytest

# Whole numbers, so that the sums are exact.
BATCH_S, VALIDATION_S = 2.0, 1000.0


class Clock:
    """A clock that only the model moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Kept(Logger):  # type: ignore[misc]
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[dict[str, float]] = []

    @property
    def name(self) -> str:
        return "kept"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.written.append(dict(metrics))

    def log_hyperparams(self, *arguments: Any, **more: Any) -> None:
        """Keeps nothing."""


class Model(lightning.LightningModule):  # type: ignore[misc]
    """A model whose validation takes long, by the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch: Any, index: int) -> Any:
        self.clock.now += BATCH_S
        return self.layer(batch[0]).sum()

    def validation_step(self, batch: Any, index: int) -> None:
        self.clock.now += VALIDATION_S

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_validation_is_no_part_of_a_training_step(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, kept = Clock(), Kept()
    monkeypatch.setattr("ronde.lightning.monitor.StepMonitor", functools.partial(StepMonitor, clock=clock))
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        # After two batches and at the end of each epoch.
        val_check_interval=2,
        num_sanity_val_steps=1,
        callbacks=[StepMonitorCallback(every=3)],
        logger=kept,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    data = TensorDataset(torch.zeros(8, 2))
    trainer.fit(Model(clock), DataLoader(data, batch_size=2), DataLoader(TensorDataset(torch.zeros(1, 2))))
    steps = [metrics["ronde/step_seconds"] for metrics in kept.written if "ronde/step_seconds" in metrics]
    # In each epoch three batches, then the last one.
    assert steps == [BATCH_S] * 4, kept.written
    # One validation before the training.
    assert clock.now == 8 * BATCH_S + 5 * VALIDATION_S
