"""Epochs of estimators: their batches, their checkpoints, and how an interrupted run continues. Without ranks."""

from __future__ import annotations

import os
import pathlib
import types
from typing import Any

import lightning
import pytest
import ronde.torch as hvd
import torch
from ronde.lightning.environment import Place
from ronde.spark.common.progress import Progress
from ronde.spark.lightning.callbacks import Run
from ronde.spark.lightning.modules import WrappedModule
from ronde.spark.lightning.training import _InSession, _Tensors, _trainer
from ronde.spark.torch.batches import Shapes
from ronde.spark.torch.losses import Losses, metrics_of, modules_of
from ronde.spark.torch.models import state_of
from ronde.spark.torch.training import _Training

STEPS = 3


def training(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[int]]:
    """The training of one rank, and the numbers of its steps."""
    made: Any = object.__new__(_Training)
    made.task = types.SimpleNamespace(train_steps=STEPS, val_steps=STEPS, labels=["y"])
    made.model, made.device, made.metrics = torch.nn.Linear(1, 1), "cpu", [[]]
    made.shapes = Shapes(["x"], ["y"])
    made.loss = lambda outputs, labels, weights: torch.nn.functional.mse_loss(outputs[0], labels[0])
    steps: list[int] = []

    def step(index: int, batch: Any) -> Any:
        steps.append(index)
        return made.model(*batch.inputs), torch.tensor(1.0)

    made._step = step
    monkeypatch.setattr(hvd, "allreduce", lambda tensor, **_: tensor)
    return made, steps


@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.parametrize(
    ("batches", "message"), [(STEPS - 1, "gave 2 batches"), (STEPS, ""), (STEPS + 1, "more than 3")]
)
def test_another_number_of_batches_ends_a_rank_before_a_step_alone(
    monkeypatch: pytest.MonkeyPatch, batches: int, message: str, validates: bool
) -> None:
    made, steps = training(monkeypatch)
    data = [{"x": torch.ones(2, 1), "y": torch.ones(2, 1)}] * batches
    run = made._validate if validates else made._train_epoch
    if message:
        with pytest.raises(ValueError, match=message):
            run(data)
    else:
        assert run(data)["loss"] > 0
    assert validates or steps == list(range(min(batches, STEPS)))


def test_fewer_batches_end_a_rank_of_lightning_and_not_its_epoch() -> None:
    settings = dict.fromkeys(("input_shapes", "label_shapes", "categorical_cols"))
    task: Any = types.SimpleNamespace(features=["x"], labels=["y"], weight=None, settings=settings)
    batch = {"x": torch.ones(2, 1), "y": torch.ones(2, 1)}
    assert len(list(_Tensors([batch] * STEPS, task, STEPS))) == STEPS
    plain = torch.nn.Linear(1, 1)
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.1), Losses([torch.nn.MSELoss()], None)
    module = WrappedModule(plain, optimizer, losses, [[]], ["x"], ["y"], None)
    trainer = lightning.Trainer(
        max_epochs=1,
        limit_train_batches=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(ValueError, match="gave 2 batches for an epoch of 3"):
        trainer.fit(module, _Tensors([batch] * (STEPS - 1), task, STEPS))


def test_the_trainer_uses_the_gpu_that_spark_has_assigned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ronde.spark.lightning.training.place_in_session", lambda: Place(1, 2, 1, 2, 0))
    cpu, first, assigned = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 3)
    assert _InSession(assigned).device([first]) == assigned
    assert _InSession(cpu).device([cpu]) == cpu
    # `trainer_args` has another accelerator.
    assert _InSession(assigned).device([cpu]) == cpu
    assert _InSession(cpu).device([first]) == torch.device("cuda", 1)


@pytest.mark.parametrize("place", ["callbacks", "trainer_args", ""])
def test_the_trainer_takes_callbacks_that_write_checkpoints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, place: str
) -> None:
    monkeypatch.setattr("ronde.spark.lightning.training.place_in_session", lambda: Place(0, 1, 0, 1, 0))
    monkeypatch.setattr(hvd, "rank", lambda: 0)
    given = lightning.pytorch.callbacks.ModelCheckpoint(monitor="loss", mode="max")
    settings: dict[str, Any] = dict.fromkeys(("callbacks", "gradient_compression"))
    settings |= {"terminate_on_nan": True, "log_every_n_steps": 1, "verbose": 0}
    if place == "callbacks":
        settings["callbacks"] = [given]
    extras = {
        "logger": False,
        "profiler": None,
        "trainer_args": {"callbacks": given} if place == "trainer_args" else {},
    }
    task: Any = types.SimpleNamespace(settings=settings, first_epoch=0, last_epoch=1, train_steps=1, val_steps=0)
    trainer = _trainer(task, extras, Run(task, None, ""), torch.device("cpu"), str(tmp_path))
    assert trainer.checkpoint_callbacks == ([given] if place else [])


def test_tensors_of_losses_move_to_the_device() -> None:
    functions = [torch.nn.CrossEntropyLoss(weight=torch.ones(3)), torch.nn.functional.mse_loss]
    losses = Losses(functions, None).to("meta")
    assert [each.weight.device.type for each in losses.modules()] == ["meta", "meta"]
    given = Losses([torch.nn.CrossEntropyLoss(weight=torch.ones(3))], None)
    plain = torch.nn.Linear(1, 3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    WrappedModule(plain, optimizer, given, [[]], ["x"], ["y"], None).to("meta")
    assert [each.weight.device.type for each in given.modules()] == ["meta", "meta"]


def test_metrics_that_are_modules_move_to_the_device() -> None:
    metric = torch.nn.CrossEntropyLoss(weight=torch.ones(3))
    metrics = metrics_of([metric, torch.nn.functional.mse_loss], 2)
    assert modules_of(metrics) == [metric, metric]
    plain = torch.nn.Linear(1, 3)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1.0)
    loss = Losses([torch.nn.functional.mse_loss] * 2, None)
    WrappedModule(plain, optimizer, loss, metrics, ["x"], ["y", "z"], None).to("meta")
    assert metric.weight.device.type == "meta"


@pytest.mark.parametrize(
    ("before", "epochs", "after"),
    [
        (Progress(), 5, Progress(0, 0, 5)),
        # Interrupted, and completed.
        (Progress(2, 0, 5), 5, Progress(2, 0, 5)),
        # Interrupted with another goal: so many more.
        (Progress(2, 0, 5), 3, Progress(2, 2, 5)),
        # Complete: so many more.
        (Progress(5, 0, 5), 5, Progress(5, 5, 10)),
        # A continued run that was interrupted is completed, and trains no more than it was to.
        (Progress(7, 5, 10), 5, Progress(7, 5, 10)),
        (Progress(7, 5, 10), 10, Progress(7, 7, 17)),
    ],
)
def test_an_interrupted_run_is_completed_and_another_one_continued(before: Any, epochs: int, after: Any) -> None:
    assert before.continued(epochs) == after


class Decaying(lightning.LightningModule):
    """A linear model whose learning rate is divided by ten after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        del batch_idx
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)]


def lightning_checkpoints(monkeypatch: pytest.MonkeyPatch, folder: str, epochs: int) -> list[Any]:
    """Trains on this process alone. Returns the checkpoints that are written."""
    monkeypatch.setattr(hvd, "rank", lambda: 0)
    monkeypatch.setattr(hvd, "allreduce", lambda tensor, **_: tensor)
    monkeypatch.setattr(hvd, "allgather_object", lambda names, **_: [names])
    found = []

    def sync(path: str) -> None:
        with open(os.path.join(path, "checkpoint"), "rb") as file:
            found.append(state_of(file.read()))

    remote = types.SimpleNamespace(saving_runs=True, checkpoint_filename="checkpoint", sync=sync)
    task: Any = types.SimpleNamespace(
        remote=remote, settings={"verbose": 0}, first_epoch=0, begun_epoch=0, last_epoch=epochs
    )
    run = Run(task, None, folder)
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[run],
    )
    trainer.fit(Decaying(), torch.utils.data.DataLoader(torch.ones(2, 1)))
    assert [entry["epoch"] for entry in run.history] == list(range(epochs))
    return found


def test_a_checkpoint_of_lightning_has_the_learning_rate_of_the_next_epoch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    found = lightning_checkpoints(monkeypatch, str(tmp_path), 3)
    assert [state["epoch"] for state in found] == [1, 2, 3]
    rates = [state["optimizers"][0]["param_groups"][0]["lr"] for state in found]
    assert rates == pytest.approx([0.1, 0.01, 0.001])
    assert [state["schedulers"][0]["last_epoch"] for state in found] == [1, 2, 3]


def test_only_metrics_that_all_ranks_have_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hvd, "rank", lambda: 0)
    # The other rank logs no rate and another metric, and its values are above this rank's by 1.
    monkeypatch.setattr(hvd, "allgather_object", lambda names, **_: [names, ["accuracy", "loss", "other"]])
    monkeypatch.setattr(hvd, "allreduce", lambda tensor, **_: tensor + 0.5)
    run = Run(types.SimpleNamespace(settings={"verbose": 0}, first_epoch=0), None, "")  # type: ignore[arg-type]
    run._record(3, types.SimpleNamespace(callback_metrics={"lr": 0.25, "loss": 2.0, "accuracy": torch.tensor(0.125)}))
    assert run.history == [{"epoch": 3, "accuracy": 0.625, "loss": 2.5, "lr": 0.25}]
    monkeypatch.setattr(hvd, "allgather_object", lambda names, **_: [names, []])
    monkeypatch.delattr(hvd, "allreduce")
    run._record(4, types.SimpleNamespace(callback_metrics={"lr": 0.25}))
    assert run.history[1] == {"epoch": 4, "lr": 0.25}
