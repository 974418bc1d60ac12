"""`LightningEstimator` and `LightningModel`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning
import torch

from ronde.spark.common.estimator import HorovodEstimator
from ronde.spark.common.keywords import EstimatorKeywords
from ronde.spark.common.params import Setting, with_settings
from ronde.spark.common.pickling import dumps
from ronde.spark.lightning.training import train
from ronde.spark.torch import losses, models
from ronde.spark.torch.estimator import PersistentModules, TorchModel
from ronde.spark.torch.models import MODEL

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ronde.spark.common.progress import Progress
    from ronde.spark.common.store import Store
    from ronde.spark.common.task import Task

_OF_MODULE = ("optimizer", "loss", "loss_constructors", "loss_weights", "metrics")
"""What a LightningModule defines itself."""
_OF_STEPS = ("limit_train_batches", "limit_val_batches", "overfit_batches", "fast_dev_run")
"""Arguments of the Trainer that contradict the number of batches that all ranks have."""
_OF_EPOCHS = ("max_epochs", "min_epochs", "max_steps", "min_steps", "max_time")
"""Arguments of the Trainer that contradict the number of epochs that the run has, and continues with."""


class LightningKeywords(EstimatorKeywords, total=False):
    """Arguments of LightningEstimator."""

    input_shapes: Any
    loss_constructors: Any
    train_minibatch_fn: Any
    trainer_args: Any
    num_gpus: int | None
    logger: Any
    log_every_n_steps: int
    loader_num_epochs: int | None
    terminate_on_nan: bool
    profiler: Any


@with_settings(
    Setting("input_shapes", "InputShapes", "the shape of a row of each feature", list),
    Setting("loss_constructors", "LossConstructors", "functions that return the losses, instead of loss"),
    Setting("train_minibatch_fn", "TrainMinibatchFn", "not supported: Lightning makes the steps"),
    Setting("trainer_args", "TrainerArgs", "further arguments of Lightning's Trainer", dict),
    Setting("num_gpus", "NumGPUs", "GPUs of a process: 0 or 1"),
    Setting("logger", "Logger", "the logger of Lightning"),
    Setting("log_every_n_steps", "LogEveryNSteps", "how often it logs", default=50),
    Setting("loader_num_epochs", "LoaderNumEpochs", "accepted for Horovod's programs; has no effect"),
    Setting("terminate_on_nan", "TerminateOnNan", "whether a loss that is not finite ends training", default=False),
    Setting("profiler", "Profiler", "the profiler of Lightning"),
)
class LightningEstimator(HorovodEstimator, PersistentModules):
    """Trains a LightningModule on a DataFrame, on the ranks of a job. Returns a LightningModel.

    A batch is a dictionary of tensors by column, such as `batch["features"]`. docs/SPARK_ESTIMATORS.md describes the
    parameters. A module of PyTorch is trained with `optimizer` and `loss` instead; a LightningModule has its own. The
    strategy is "horovod" of `ronde.lightning`, which multiplies learning rates by the number of ranks. The history has
    an entry for each epoch with the averages over all ranks of what was logged.

    Raises ValueError for parameters that exclude each other.
    """

    SENT = (*HorovodEstimator.SENT, "input_shapes", "terminate_on_nan", "log_every_n_steps")

    def __init__(self, **values: Unpack[LightningKeywords]) -> None:
        super().__init__(**values)
        if values.get("loss") is not None and values.get("loss_constructors") is not None:
            raise ValueError("only one of loss and loss_constructors may be given")

    def _check(self) -> None:
        model, labels = self.value("model"), len(self.value("label_cols"))
        if self.value("train_minibatch_fn") is not None:
            raise ValueError("train_minibatch_fn is for TorchEstimator; a LightningModule has its training_step")
        if (self.value("num_gpus") or 0) > 1:
            raise ValueError(f"num_gpus is {self.value('num_gpus')}; a process has one GPU: raise num_proc")
        # These would end passes early, and all ranks go on with the rest of the pass in the next epoch.
        if given := [name for name in _OF_STEPS if name in (self.value("trainer_args") or {})]:
            raise ValueError(
                f"trainer_args must not contain {', '.join(given)}; set train_steps_per_epoch and "
                "validation_steps_per_epoch instead"
            )
        if given := [name for name in _OF_EPOCHS if name in (self.value("trainer_args") or {})]:
            raise ValueError(f"trainer_args must not contain {', '.join(given)}; set epochs instead")
        if isinstance(model, lightning.LightningModule):
            if given := [name for name in _OF_MODULE if self.value(name)]:
                raise ValueError(f"{', '.join(given)} must not be given with a LightningModule, which defines them")
        elif isinstance(model, torch.nn.Module):
            if self.value("optimizer") is None:
                raise ValueError("optimizer is not set; a model that is no LightningModule needs it, and a loss")
            losses.functions_of(self.value("loss"), self.value("loss_constructors"), labels)
            losses.metrics_of(self.value("metrics"), labels)
        else:
            raise TypeError(f"model is {type(model).__name__}; give a LightningModule or a torch.nn.Module")
        self._packed()

    def _packed(self) -> dict[str, Any]:
        """What processes need, as bytes."""
        model, optimizer = self.value("model"), self.value("optimizer")
        names = ("loss", "loss_constructors", "metrics", "trainer_args", "logger", "profiler")
        return {
            "model": models.model_bytes(model),
            "optimizer": None if optimizer is None else models.optimizer_bytes(optimizer, model),
            "extras": dumps({name: self.value(name) for name in names}, f"one of {', '.join(names)}"),
            "state": None,
        }

    def _payload(self, store: Store, run_id: str) -> tuple[dict[str, Any], Progress]:
        return models.continued(self._packed(), store, run_id)

    def _remote(self) -> Any:
        return train

    def _task(self, store: Store, run_id: str, data: Any, size: int) -> Task:
        task = super()._task(store, run_id, data, size)
        if self.value("num_gpus") == 0:
            task.settings["use_gpu"] = False
        return task

    def _model(self, result: Any, task: Task, run_id: str) -> LightningModel:
        model = models.model_of(models.model_bytes(self.value("model")))
        model.load_state_dict(models.state_of(result["state"])[MODEL])
        model.eval()
        return LightningModel(
            history=result["history"],
            model=model,
            feature_columns=task.features,
            label_columns=task.labels,
            input_shapes=self.value("input_shapes"),
            run_id=run_id,
            _metadata=task.metadata,
            loss=self.value("loss"),
            loss_constructors=self.value("loss_constructors"),
            categorical_cols=self.value("categorical_cols"),
        )


class LightningModel(TorchModel):
    """A trained LightningModule, or module of PyTorch, that adds predictions to DataFrames by its `forward`."""
