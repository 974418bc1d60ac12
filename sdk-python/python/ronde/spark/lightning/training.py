"""Training of a LightningModule on one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import CSVLogger

import ronde.torch as hvd
from ronde.lightning import HorovodStrategy, RondeEnvironment
from ronde.lightning.environment import place_in_session
from ronde.spark.common.pickling import loads
from ronde.spark.lightning.callbacks import Run, TerminateOnNan
from ronde.spark.lightning.modules import WrappedModule, inner
from ronde.spark.torch import losses, models
from ronde.spark.torch.batches import Shapes, tensor_of
from ronde.spark.torch.models import MODEL
from ronde.spark.torch.training import device_of, seed_all

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ronde.spark.common.task import Task


def train(task: Task) -> Any:
    """Trains on this rank. Returns, on rank 0, the history and the model's state as bytes.

    Raises RuntimeError if some ranks have a GPU and others do not.
    """
    hvd.init()
    seed_all(task.settings["random_seed"])
    device = device_of(task.settings["use_gpu"])
    payload = task.payload
    state = models.state_of(payload["state"]) if payload["state"] is not None else None
    extras = loads(payload["extras"])
    model = _model(task, extras, state)
    with task.remote.get_local_output_dir() as folder, task.data(hvd.rank(), hvd.size()) as data:
        run = Run(task, state, folder)
        trainer = _trainer(task, extras, run, device, folder)
        train_data = _Tensors(data.train_data(), task, task.train_steps)
        val_data = _Tensors(data.val_data(), task, task.val_steps) if task.has_val else None
        trainer.fit(model, train_data, val_data)
        if hvd.rank() == 0 and task.remote.saving_runs:
            # What the logger has written since the last checkpoint.
            task.remote.sync(folder)
    result = None
    if hvd.rank() == 0:
        weights = {name: value.detach().cpu() for name, value in inner(model).state_dict().items()}
        result = {"history": run.history, "state": models.state_bytes({MODEL: weights})}
    hvd.shutdown()
    return result


def _model(task: Task, extras: dict[str, Any], state: dict[str, Any] | None) -> Any:
    """The LightningModule to train, with the weights of the run's checkpoint."""
    given = models.model_of(task.payload["model"])
    if state is not None:
        given.load_state_dict(state[MODEL])
    if isinstance(given, lightning.LightningModule):
        return given
    labels = len(task.labels)
    return WrappedModule(
        given,
        models.optimizer_of(task.payload["optimizer"], given),
        losses.Losses(
            losses.functions_of(extras["loss"], extras["loss_constructors"], labels), task.settings["loss_weights"]
        ),
        losses.metrics_of(extras["metrics"], labels),
        task.features,
        task.labels,
        task.weight,
    )


def _trainer(task: Task, extras: dict[str, Any], run: Run, device: torch.device, folder: str) -> Any:
    settings = task.settings
    strategy = HorovodStrategy(
        _InSession(device),
        # The checkpoint has the rates that were multiplied before.
        scale_learning_rate=task.first_epoch == 0,
        optimizer_settings={"compression": settings["gradient_compression"] or hvd.Compression.none},
    )
    given = extras["trainer_args"] or {}
    callbacks = [*(settings["callbacks"] or []), run]
    if settings["terminate_on_nan"]:
        callbacks.append(TerminateOnNan())
    callbacks += _listed(given.get("callbacks"))
    logger = extras["logger"]
    if logger is None:
        logger = CSVLogger(folder, task.remote.logs_subdir) if task.remote.saving_runs else False
    arguments: dict[str, Any] = {
        "max_epochs": task.last_epoch,
        "accelerator": "gpu" if device.type == "cuda" else "cpu",
        "devices": 1,
        "logger": logger,
        "log_every_n_steps": settings["log_every_n_steps"],
        "profiler": extras["profiler"],
        "enable_progress_bar": settings["verbose"] > 1 and hvd.rank() == 0,
        "enable_model_summary": settings["verbose"] > 1 and hvd.rank() == 0,
        # The Trainer refuses callbacks that write checkpoints without it, and adds one of its own with it.
        "enable_checkpointing": any(isinstance(each, Checkpoint) for each in callbacks),
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
        "use_distributed_sampler": False,
        "limit_train_batches": task.train_steps,
        "limit_val_batches": task.val_steps,
        **given,
        "callbacks": callbacks,
    }
    trainer = lightning.Trainer(strategy=strategy, **arguments)
    progress = trainer.fit_loop.epoch_progress.current
    progress.ready = progress.started = progress.processed = progress.completed = task.first_epoch
    return trainer


def _listed(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [] if given is None else [given]


class _InSession(RondeEnvironment):
    """Ranks and sizes of the session, whoever has started the process.

    device -- of this rank: Spark may have assigned another GPU than that of the local rank
    """

    def __init__(self, device: torch.device) -> None:
        lightning.fabric.plugins.environments.ClusterEnvironment.__init__(self)
        self.place = place_in_session()
        self._device = device

    def device(self, devices: list[torch.device]) -> torch.device:
        """Returns the device of this rank, unless `trainer_args` has another accelerator."""
        return self._device if devices[0].type == self._device.type else super().device(devices)


class _Tensors:
    """Batches as dictionaries of tensors by column.

    loader -- yields dictionaries of arrays
    steps  -- batches of a pass

    Raises ValueError, while it is iterated over, if the loader yields fewer.
    """

    def __init__(self, loader: Iterable[Any], task: Task, steps: int) -> None:
        settings = task.settings
        self._loader, self._steps, self._task = loader, steps, task
        self._shapes = Shapes(
            task.features,
            task.labels,
            task.weight,
            settings["input_shapes"],
            settings["label_shapes"],
            settings["categorical_cols"] or (),
        )

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        task, given = self._task, 0
        for columns in self._loader:
            given += 1
            batch = self._shapes.batch(columns)
            tensors = dict(zip(task.labels, batch.labels))
            if task.weight and batch.weights is not None:
                tensors[task.weight] = batch.weights
            # A column may be feature and label; then it is as features are.
            tensors.update(zip(task.features, batch.inputs))
            further = [name for name in columns if name not in tensors]
            yield {**{name: tensor_of(columns[name]) for name in further}, **tensors}
        # The Trainer would end the epoch here, and the other ranks wait for this one in their next step for ever.
        if given < self._steps:
            raise ValueError(f"the data module gave {given} batches for an epoch of {self._steps}")
