"""`KerasEstimator` and `KerasModel`."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import keras

from ronde.spark.common import keras_task
from ronde.spark.common.estimator import HorovodEstimator, HorovodModel
from ronde.spark.common.keywords import EstimatorKeywords, ModelKeywords
from ronde.spark.common.params import Setting, with_settings
from ronde.spark.common.persistence import Persistent, Stored, restored, stored
from ronde.spark.common.pickling import dumps, loads
from ronde.spark.common.progress import Progress
from ronde.spark.keras import models
from ronde.spark.keras.batches import shapes_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ronde.spark.common.store import Store
    from ronde.spark.common.task import Task

_MODEL, _PACKED = "keras", "keras-objects"


class _PersistentKeras(Persistent):
    """Saving of models in Keras' format, and of losses, metrics and optimizers as their configurations."""

    def encoded(self, values: dict[str, Any]) -> list[Stored]:
        """Returns parameters as bytes."""
        rows = []
        for name, value in values.items():
            if name == "model" and value is not None:
                rows.append(Stored(name, _MODEL, models.model_bytes(value)))
            elif name in ("optimizer", "loss", "metrics") and not isinstance(value, str):
                rows.append(Stored(name, _PACKED, dumps(models.packed(value), name)))
            else:
                rows.append(stored(name, value))
        return rows

    @classmethod
    def decoded(cls, rows: list[Stored]) -> dict[str, Any]:
        """Returns the parameters of `encoded`."""
        known: dict[str, Any] = {}
        values: dict[str, Any] = {}
        for row in sorted(rows, key=lambda row: row.name != "custom_objects"):
            if row.format == _MODEL:
                values[row.name] = models.model_of(row.content, known)
            elif row.format == _PACKED:
                values[row.name] = models.unpacked(loads(row.content), known)
            else:
                values[row.name] = restored(row)
            known = values.get("custom_objects") or {}
        return values


class KerasKeywords(EstimatorKeywords, total=False):
    """Arguments of KerasEstimator."""

    custom_objects: Any
    checkpoint_callback: Any
    backend_env: Any
    tensorflow_dataset_prefetch_buffer_size: int | None


@with_settings(
    Setting("custom_objects", "CustomObjects", "classes and functions of the model by name", dict),
    Setting("checkpoint_callback", "CheckpointCallback", "a ModelCheckpoint, whose file is the model that fit returns"),
    Setting("backend_env", "BackendEnv", "environment variables of the processes", dict),
    Setting(
        "tensorflow_dataset_prefetch_buffer_size",
        "TensorflowDatasetPrefetchBufferSize",
        "prefetched batches, if train_async_data_loader_queue_size is not set",
        default=0,
    ),
)
class KerasEstimator(HorovodEstimator, _PersistentKeras):
    """Trains a model of Keras 3 on a DataFrame, on the ranks of a job. Returns a KerasModel.

    docs/SPARK_ESTIMATORS.md describes the parameters. All ranks start with the given model, and its optimizer with a
    learning rate that is multiplied by their number. Gradients are averages over all ranks. The history has a list of
    values, one for each epoch, for each metric. Keras' back end, TensorFlow or PyTorch, and its floating-point type are
    those of this process. Without `loss`, the loss, the loss weights and the metrics are those of the compiled model,
    but `loss_weights` and `metrics` of the estimator have precedence.

    Raises ValueError for parameters that exclude each other.
    """

    # Callbacks are pickled apart: unpickling them imports Keras.
    SENT = tuple(name for name in HorovodEstimator.SENT if name != "callbacks")

    def __init__(self, **values: Unpack[KerasKeywords]) -> None:
        super().__init__(**values)

    def _check(self) -> None:
        model = self.value("model")
        if not isinstance(model, keras.Model):
            raise TypeError(
                f"model is a {type(model).__module__}.{type(model).__name__}; KerasEstimator takes a keras.Model of "
                "Keras 3. Train a model of tf-keras with ronde.spark.run"
            )
        if self._compiled_with("optimizer") is None or self._compiled_with("loss") is None:
            raise ValueError("optimizer or loss is not set; give both, or a model that is compiled with them")
        if not getattr(model, "built", False):
            raise ValueError("the model is not built; give its first layer an input shape, or call model.build")
        shapes_of(model, len(self.value("feature_cols")))
        optimizer = self._optimizer()
        # A LossScaleOptimizer has the learning rate of the one inside.
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        if not isinstance(inner.get_config().get("learning_rate"), (int, float)):
            raise ValueError(
                "the optimizer's learning rate is a schedule, which cannot be multiplied by the number of processes; "
                "give a number, and a callback such as LearningRateScheduleCallback"
            )
        self._packed()

    def _compiled_with(self, name: str) -> Any:
        """A parameter, or what the model was compiled with."""
        value = self.value(name)
        if value is None and getattr(self.value("model"), "compiled", False):
            value = getattr(self.value("model"), name, None)
        return value

    def _optimizer(self) -> Any:
        """The optimizer, with a scale of the loss where layers compute in float16.

        In the processes that train, `compile` adds none: a model that is loaded has the policy of its process, and only
        its layers have that with which they were saved.
        """
        optimizer = keras.optimizers.get(self._compiled_with("optimizer"))
        scaled = keras.mixed_precision.LossScaleOptimizer
        if isinstance(optimizer, scaled) or not models.needs_loss_scale(self.value("model")):
            return optimizer
        return scaled(optimizer)

    def _compilation(self, known: dict[str, Any]) -> dict[str, Any]:
        """Arguments of `compile` besides the optimizer.

        Where the loss is that of the compiled model, so are the loss weights and metrics that the estimator does not
        set, and the weighted metrics. Raises ValueError if these cannot be read from the model.

        known -- custom objects by name
        """
        given = {name: self.value(name) for name in ("loss", "loss_weights", "metrics")}
        if given["loss"] is not None:
            return given
        wanted = [name for name, value in given.items() if value is None and name != "loss"] + ["weighted_metrics"]
        compiled = models.compiled_with(self.value("model"), wanted, known)
        return {**given, **compiled, "loss": self._compiled_with("loss")}

    def _packed(self) -> dict[str, Any]:
        """What processes need, as bytes. Raises TypeError for a model that cannot be saved and loaded."""
        known = models.known_objects(self.value("custom_objects"))
        compilation = self._compilation(known)
        content = models.model_bytes(self.value("model"))
        try:
            models.model_of(content, known)
        except Exception as error:
            raise TypeError(
                f"the model ({type(self.value('model')).__name__}) cannot be loaded after it is saved, so the "
                f"processes that train cannot load it: {type(error).__name__}: {error}. Give its classes and functions "
                "in custom_objects"
            ) from error
        extras = {
            "custom_objects": known,
            "optimizer": models.packed(self._optimizer()),
            "compilation": models.packed(compilation),
            "callbacks": self.value("callbacks"),
            "checkpoint_callback": self.value("checkpoint_callback"),
        }
        what = "one of custom_objects, loss, metrics, callbacks and checkpoint_callback"
        return {
            "keras_backend": keras.backend.backend(),
            "floatx": keras.config.floatx(),
            "model": content,
            "extras": dumps(extras, what),
        }

    def _payload(self, store: Store, run_id: str) -> tuple[dict[str, Any], Progress]:
        payload = self._packed()
        path = store.get_checkpoint_path(run_id)
        if not store.saving_runs() or not store.exists(path):
            return payload, Progress()
        payload["model"] = store.read(path)
        state, _ = models.state_of(payload["model"])
        return payload, Progress(state.get("epoch", 0), state.get("begun", 0), state.get("planned", 0))

    def _task(self, store: Store, run_id: str, data: Any, size: int) -> Task:
        task = super()._task(store, run_id, data, size)
        prefetched = self.value("tensorflow_dataset_prefetch_buffer_size")
        if prefetched and task.settings["train_async_data_loader_queue_size"] is None:
            task.settings["train_async_data_loader_queue_size"] = max(0, int(prefetched)) or None
        return task

    def _input_shapes(self, count: int) -> Any:
        return shapes_of(self.value("model"), count)

    def _environment(self) -> dict[str, str] | None:
        return self.value("backend_env")  # type: ignore[no-any-return]

    def _remote(self) -> Any:
        return keras_task.train

    def _model(self, result: Any, task: Task, run_id: str) -> KerasModel:
        known = models.known_objects(self.value("custom_objects"))
        model = models.model_of(result["model"], known)
        optimizer = models.unpacked(models.packed(self._optimizer()), known)
        model.compile(optimizer=optimizer, **models.unpacked(models.packed(self._compilation(known)), known))
        return KerasModel(
            history=result["history"],
            model=model,
            feature_columns=task.features,
            label_columns=task.labels,
            custom_objects=self.value("custom_objects"),
            run_id=run_id,
            _metadata=task.metadata,
            _floatx=keras.config.floatx(),
        )


class KerasModelKeywords(ModelKeywords, total=False):
    """Arguments of KerasModel."""

    custom_objects: Any
    _floatx: str | None


@with_settings(
    Setting("custom_objects", "CustomObjects", "classes and functions of the model by name", dict),
    Setting("_floatx", "Floatx", "Keras' floating-point type in training"),
)
class KerasModel(HorovodModel, _PersistentKeras):
    """A trained model of Keras that adds predictions to DataFrames. `getModel()` returns the model."""

    def __init__(self, **values: Unpack[KerasModelKeywords]) -> None:
        super().__init__(**values)

    def _predictor(self) -> Any:
        known = dumps(models.known_objects(self.value("custom_objects")), "custom_objects")
        return functools.partial(
            keras_task.predictor,
            keras.backend.backend(),
            self.value("_floatx") or keras.config.floatx(),
            models.model_bytes(self.value("model")),
            known,
            self.value("feature_columns"),
        )

    def _input_shapes(self) -> Any:
        return shapes_of(self.value("model"), len(self.value("feature_columns")))

    def _output_sizes(self, df: Any) -> list[int]:
        # The predictor sets the type of training, here in the program's process.
        own = keras.config.floatx()
        try:
            return super()._output_sizes(df)
        finally:
            keras.config.set_floatx(own)
