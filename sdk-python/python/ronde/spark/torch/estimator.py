"""`TorchEstimator` and `TorchModel`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ronde.spark.common.estimator import HorovodEstimator, HorovodModel
from ronde.spark.common.keywords import EstimatorKeywords, ModelKeywords
from ronde.spark.common.params import Setting, at_least, with_settings
from ronde.spark.common.persistence import Persistent, Stored, restored, stored
from ronde.spark.common.pickling import dumps
from ronde.spark.torch import losses, models
from ronde.spark.torch.batches import Shapes, as_outputs
from ronde.spark.torch.models import MODEL
from ronde.spark.torch.training import OPTIMIZER, train

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ronde.spark.common.progress import Progress
    from ronde.spark.common.store import Store
    from ronde.spark.common.task import Task

_MODULE, _OPTIMIZER = "torch-model", "torch-optimizer"


class PersistentModules(Persistent):
    """Saving of models and of optimizers, which refer to their model's parameters."""

    def encoded(self, values: dict[str, Any]) -> list[Stored]:
        """Returns parameters as bytes."""
        rows = []
        for name, value in values.items():
            if name == "model" and value is not None:
                rows.append(Stored(name, _MODULE, models.model_bytes(value)))
            elif name == "optimizer" and value is not None:
                rows.append(Stored(name, _OPTIMIZER, models.optimizer_bytes(value, values["model"])))
            else:
                rows.append(stored(name, value))
        return rows

    @classmethod
    def decoded(cls, rows: list[Stored]) -> dict[str, Any]:
        """Returns the parameters of `encoded`."""
        values: dict[str, Any] = {}
        for row in sorted(rows, key=lambda row: row.format == _OPTIMIZER):
            if row.format == _MODULE:
                values[row.name] = models.model_of(row.content)
            elif row.format == _OPTIMIZER:
                values[row.name] = models.optimizer_of(row.content, values["model"])
            else:
                values[row.name] = restored(row)
        return values


class TorchKeywords(EstimatorKeywords, total=False):
    """Arguments of TorchEstimator."""

    input_shapes: Any
    loss_constructors: Any
    train_minibatch_fn: Any
    backward_passes_per_step: int


@with_settings(
    Setting("input_shapes", "InputShapes", "the shape of a row of each feature", list),
    Setting("loss_constructors", "LossConstructors", "functions that return the losses, instead of loss"),
    Setting("train_minibatch_fn", "TrainMinibatchFn", "a function that makes a step"),
    Setting("backward_passes_per_step", "BackwardPassesPerStep", "backward passes for each step", at_least(1), 1),
)
class TorchEstimator(HorovodEstimator, PersistentModules):
    """Trains a model of PyTorch on a DataFrame, on the ranks of a job. Returns a TorchModel.

    docs/SPARK_ESTIMATORS.md describes the parameters. All ranks start with the given model, and its optimizer with a
    learning rate that is multiplied by their number. Gradients are averages over all ranks. The history has an entry
    for each epoch: {"epoch": 0, "train": {"loss": ...}, "validation": {...}}.

    Raises ValueError for parameters that exclude each other.
    """

    SENT = (*HorovodEstimator.SENT, "input_shapes", "backward_passes_per_step")

    def __init__(self, **values: Unpack[TorchKeywords]) -> None:
        super().__init__(**values)
        if values.get("loss") is not None and values.get("loss_constructors") is not None:
            raise ValueError("only one of loss and loss_constructors may be given")

    def _check(self) -> None:
        labels = len(self.value("label_cols"))
        model, optimizer = self.value("model"), self.value("optimizer")
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model is {type(model).__name__}; TorchEstimator takes a torch.nn.Module")
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer is {type(optimizer).__name__}; give a torch.optim.Optimizer")
        # The function makes a step for each batch, so that the number would have no effect.
        if self.value("train_minibatch_fn") is not None and self.value("backward_passes_per_step") > 1:
            raise ValueError(
                "backward_passes_per_step is above 1, but train_minibatch_fn makes each step itself; give one of them"
            )
        losses.functions_of(self.value("loss"), self.value("loss_constructors"), labels)
        losses.metrics_of(self.value("metrics"), labels)
        for name, count in (("input_shapes", len(self.value("feature_cols"))), ("label_shapes", labels)):
            shapes = self.value(name)
            if shapes is not None and len(shapes) != count:
                raise ValueError(f"{name} has {len(shapes)} shapes for {count} columns; give one for each")
        self._packed()

    def _packed(self) -> dict[str, Any]:
        """What processes need, as bytes."""
        model = self.value("model")
        extras = {name: self.value(name) for name in ("loss", "loss_constructors", "metrics", "train_minibatch_fn")}
        return {
            "model": models.model_bytes(model),
            "optimizer": models.optimizer_bytes(self.value("optimizer"), model),
            "extras": dumps(extras, "one of loss, loss_constructors, metrics and train_minibatch_fn"),
            "state": None,
        }

    def _payload(self, store: Store, run_id: str) -> tuple[dict[str, Any], Progress]:
        return models.continued(self._packed(), store, run_id)

    def _remote(self) -> Any:
        return train

    def _model(self, result: Any, task: Task, run_id: str) -> TorchModel:
        state = models.state_of(result["state"])
        packed = self._packed()
        model = models.model_of(packed["model"])
        optimizer = models.optimizer_of(packed["optimizer"], model)
        model.load_state_dict(state[MODEL])
        optimizer.load_state_dict(state[OPTIMIZER])
        model.eval()
        return TorchModel(
            history=result["history"],
            model=model,
            feature_columns=task.features,
            label_columns=task.labels,
            input_shapes=self.value("input_shapes"),
            optimizer=optimizer,
            run_id=run_id,
            _metadata=task.metadata,
            loss=self.value("loss"),
            loss_constructors=self.value("loss_constructors"),
            categorical_cols=self.value("categorical_cols"),
        )


class TorchModelKeywords(ModelKeywords, total=False):
    """Arguments of TorchModel."""

    input_shapes: Any
    optimizer: Any
    loss: Any
    loss_constructors: Any


@with_settings(
    Setting("input_shapes", "InputShapes", "the shape of a row of each feature", list),
    Setting("optimizer", "Optimizer", "the optimizer with its state after training"),
    Setting("loss", "Loss", "the losses of training"),
    Setting("loss_constructors", "LossConstructors", "the functions that returned them"),
)
class TorchModel(HorovodModel, PersistentModules):
    """A trained model of PyTorch that adds predictions to DataFrames. `getModel()` returns the model."""

    def __init__(self, **values: Unpack[TorchModelKeywords]) -> None:
        super().__init__(**values)

    def _shapes(self) -> Shapes:
        return Shapes(
            self.value("feature_columns"),
            self.value("label_columns"),
            inputs=self.value("input_shapes"),
            categorical=self.value("categorical_cols") or (),
        )

    def get_prediction_fn(self) -> Any:
        """Returns a picklable function from arrays by column to a list of arrays, one for each output."""
        return self._predictor()()

    def _predictor(self) -> Any:
        content, shapes = models.model_bytes(self.value("model")), self._shapes()

        def load() -> Any:
            model = models.model_of(content).to("cpu").eval()

            def predict(columns: dict[str, Any]) -> list[Any]:
                with torch.no_grad():
                    outputs = as_outputs(model(*shapes.tensors(columns)))
                # Columns of predictions are doubles, which whole numbers and float64 need.
                return [output.double().numpy() for output in outputs]

            return predict

        return load
