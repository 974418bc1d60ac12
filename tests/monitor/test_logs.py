"""What TensorBoard and Weights & Biases have of the values of `ronde.monitor`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import wandb
from ronde.monitor import StepReport, TensorBoardLog, WandbLog
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

if TYPE_CHECKING:
    import pathlib

REPORT = StepReport(
    step_seconds=0.5, in_flight_share=0.25, waiting_share=0.125, bytes_per_step=64, operations_per_step=2
)


def test_tensorboard_reads_the_values(tmp_path: pathlib.Path) -> None:
    log = TensorBoardLog(tmp_path)
    log.write(REPORT.values(), 7)
    log.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    for name, value in REPORT.values().items():
        assert [(event.step, event.value) for event in events.Scalars(name)] == [(7, value)]


def test_wandb_gets_the_values_with_the_programs_next_ones(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    with pytest.raises(RuntimeError, match=r"call wandb.init\(\) before"):
        WandbLog()
    with wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(x_disable_stats=True)) as run:
        WandbLog().write(REPORT.values(), 7)
        run.log({"loss": 2.0})
        WandbLog(run, commit=True).write({"ronde/step_seconds": 3.0}, 8)
        assert run.step == 2, "the first values are of the step of the loss"
        assert run.summary["ronde/waiting_share"] == REPORT.waiting_share
        assert run.summary["loss"] == 2.0
        assert run.summary["ronde/step_seconds"] == 3.0
