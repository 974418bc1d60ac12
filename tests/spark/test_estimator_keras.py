"""`KerasEstimator` on a session of Spark."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any
from unittest import mock

import keras
import numpy
import pytest
from pyspark.sql import functions as sql
from ronde.spark.common import keras_task
from ronde.spark.common.pickling import loads
from ronde.spark.common.prepare import clear_training_cache
from ronde.spark.common.store import LocalStore
from ronde.spark.keras import KerasEstimator, KerasModel, callbacks, models, training
from sklearn.datasets import load_iris

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKS, RATE = 2, 0.02


@pytest.fixture
def doubles() -> Iterator[None]:
    """Makes float64 the floating-point type of Keras."""
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def frame(spark: Any) -> Any:
    """150 flowers of three kinds, whose measures are standardized."""
    measures, kinds = load_iris(return_X_y=True)
    measures = (measures - measures.mean(0)) / measures.std(0)
    listed = [(row.tolist(), int(kind), index % 5 == 0) for index, (row, kind) in enumerate(zip(measures, kinds))]
    return spark.createDataFrame(listed, ["features", "kind", "held"])


def scaled(values: Any) -> Any:
    return values * 0.5


def estimator(store: Any, **changed: Any) -> KerasEstimator:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Input((4,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(3)]
    settings = {
        "num_proc": RANKS,
        "store": store,
        "model": keras.Sequential(layers),
        "optimizer": keras.optimizers.SGD(RATE, momentum=0.9),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
        "feature_cols": ["features"],
        "label_cols": ["kind"],
        "batch_size": 15,
        "partitions_per_process": 1,
        "random_seed": 3,
        "verbose": 0,
        **changed,
    }
    return KerasEstimator(**settings)


def test_a_model_is_trained_saved_and_continued(spark: Any, tmp_path: pathlib.Path) -> None:
    clear_training_cache()
    store, df = LocalStore(str(tmp_path / "store")), frame(spark)
    given = estimator(store, validation="held", epochs=6, run_id="run")
    trained = given.fit(df)
    history = trained.getHistory()
    assert {name: len(values) for name, values in history.items()} == dict.fromkeys(
        ["accuracy", "loss", "val_accuracy", "val_loss"], 6
    )
    assert history["loss"][-1] < history["loss"][0] / 2
    assert history["val_accuracy"][-1] > 0.8
    # All rows for validation, on two ranks with 15 each, count equally.
    held = df.filter("held").collect()
    scores = trained.getModel().predict(numpy.array([row["features"] for row in held], "float32"), verbose=0)
    right = numpy.mean(scores.argmax(1) == [row["kind"] for row in held])
    assert history["val_accuracy"][-1] == pytest.approx(right, abs=1e-5)
    found = trained.setOutputCols(["scores"]).transform(df.filter("held")).select("scores").collect()
    numpy.testing.assert_allclose([row[0].toArray() for row in found], scores, rtol=1e-4, atol=1e-5)
    trained.save(str(tmp_path / "model"))
    loaded = KerasModel.load(str(tmp_path / "model"))
    assert loaded.getHistory() == history
    check_weights(loaded.getModel(), trained.getModel())
    # The checkpoint is a file of Keras with the state of the optimizer.
    content = store.read(store.get_checkpoint_path("run"))
    check_weights(models.model_of(content), trained.getModel())
    assert models.state_of(content)[0] == {"epoch": 6, "planned": 6, "begun": 0}
    given.save(str(tmp_path / "estimator"))
    again = KerasEstimator.load(str(tmp_path / "estimator")).setEpochs(1)
    further = again.setCheckpointCallback(callbacks.BestModelCheckpoint(monitor="val_loss")).fit(df)
    assert further.getHistory()["loss"][0] < history["loss"][-1] * 1.2
    state = models.state_of(store.read(store.get_checkpoint_path("run")))[0]
    assert state == {"epoch": 7, "planned": 7, "begun": 6}


def check_weights(model: Any, expected: Any) -> None:
    for mine, other in zip(model.get_weights(), expected.get_weights()):
        numpy.testing.assert_array_equal(mine, other)


class Unsaved(keras.layers.Layer):
    """A layer that cannot be made from its configuration."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def call(self, values: Any) -> Any:
        return self.function(values)


def test_bad_input_is_refused_before_training(spark: Any, tmp_path: pathlib.Path) -> None:
    store, df = LocalStore(str(tmp_path)), frame(spark)
    inputs = keras.Input((4,))
    unsaved = keras.Model(inputs, keras.layers.Dense(3)(Unsaved(scaled)(inputs)))
    schedule = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))
    for changed, kind, message in [
        ({"model": unsaved}, TypeError, r"the model \(Functional\) cannot be (loaded after it is saved|pickled)"),
        ({"model": "text"}, TypeError, "takes a keras.Model"),
        ({"model": keras.Sequential([keras.layers.Dense(3)])}, ValueError, "the model is not built"),
        ({"optimizer": schedule}, ValueError, "learning rate is a schedule"),
        ({"loss": None}, ValueError, "optimizer or loss is not set"),
        ({"feature_cols": ["features", "kind"]}, ValueError, "1 inputs for 2 feature_cols"),
    ]:
        with pytest.raises(kind, match=message):
            estimator(store, **changed).fit(df)
    assert not store.exists(store.get_train_data_path(0))


def two_heads(**compiled: Any) -> Any:
    """A compiled model with two outputs of one number each."""
    inputs = keras.Input((4,), dtype=keras.config.floatx())
    heads = [keras.layers.Dense(1, name=name, dtype=keras.config.floatx())(inputs) for name in ("first", "second")]
    model = keras.Model(inputs, heads)
    model.compile(optimizer=keras.optimizers.SGD(RATE), loss=["mse", "mse"], **compiled)
    return model


def test_a_model_is_trained_with_what_it_was_compiled_with(doubles: None, spark: Any, tmp_path: pathlib.Path) -> None:
    del doubles
    clear_training_cache()
    model = two_heads(loss_weights=[1.0, 0.0], metrics=[["mae"], [keras.metrics.MeanAbsoluteError(name="mae")]])
    df = frame(spark).withColumn("other", sql.col("kind") + 0.5)
    given = {"model": model, "optimizer": None, "loss": None, "metrics": None, "label_cols": ["kind", "other"]}
    trained = estimator(LocalStore(str(tmp_path)), **given).fit(df)
    assert {"first_mae", "second_mae"} <= set(trained.getHistory())
    moved = [
        not numpy.array_equal(mine, other) for mine, other in zip(trained.getModel().get_weights(), model.get_weights())
    ]
    assert moved == [True, True, False, False]
    assert {str(values.dtype) for values in trained.getModel().get_weights()} == {"float64"}
    assert trained.value("_floatx") == "float64"


class Unknown(keras.metrics.MeanAbsoluteError):
    """A metric that Keras does not know by its name."""


def test_the_compilation_of_a_model_is_that_of_its_loss() -> None:
    def compilation(model: Any, **changed: Any) -> Any:
        wanted = estimator(None, model=model, **{"loss": None, "metrics": None, **changed})
        return wanted._compilation(models.known_objects(wanted.value("custom_objects")))

    model = two_heads(loss_weights=[0.25, 0.75], metrics=[["mae"], None], weighted_metrics=[None, ["mse"]])
    found = compilation(model)
    assert found == {
        "loss": ["mse", "mse"],
        "loss_weights": [0.25, 0.75],
        "metrics": [["mae"], None],
        "weighted_metrics": [None, ["mse"]],
    }
    own = compilation(model, loss_weights=[1.0, 2.0], metrics=["mse"])
    assert own == {**found, "loss_weights": [1.0, 2.0], "metrics": ["mse"]}
    assert compilation(model, loss="mse") == {"loss": "mse", "loss_weights": None, "metrics": None}
    unknown = two_heads(metrics=[[Unknown()], None])
    with pytest.raises(ValueError, match="metrics of the compiled model cannot be made again"):
        compilation(unknown)
    assert isinstance(compilation(unknown, custom_objects={"Unknown": Unknown})["metrics"][0][0], Unknown)
    assert compilation(unknown, metrics=["mae"])["metrics"] == ["mae"]


def test_predictions_have_the_floating_point_type_of_training(doubles: None) -> None:
    del doubles
    inputs = keras.Input((1,), dtype="float64")
    model = keras.Model(inputs, keras.layers.Identity(dtype="float64")(inputs))
    trained = KerasModel(model=model, feature_columns=["x"], label_columns=["y"], _floatx="float64")
    assert estimator(None, model=model)._packed()["floatx"] == "float64"
    # As in the process of an executor. The first whole number that float32 does not have.
    keras.config.set_floatx("float32")
    assert trained._output_sizes(None) == [1]
    assert keras.config.floatx() == "float32"
    predict = trained._predictor()()
    assert predict({"x": numpy.array([16777217.0])})[0].reshape(-1).tolist() == [16777217.0]
    keras_task.use_backend(keras.backend.backend(), "float32")
    assert keras.config.floatx() == "float32"


def compiled(given: KerasEstimator, monkeypatch: pytest.MonkeyPatch, checkpoint: bytes | None = None) -> Any:
    """The model of an estimator as one of two ranks compiles it, in a process that has the policy float32."""
    monkeypatch.setattr(training.hvd, "size", lambda: 2)
    given._check()
    payload = given._packed()
    payload["model"] = checkpoint or payload["model"]
    task = mock.Mock(payload=payload, settings={"gradient_compression": None})
    extras = loads(payload["extras"])
    model = models.model_of(payload["model"], extras["custom_objects"])
    training._compiled(task, model, extras, extras["custom_objects"])
    return model


def test_xla_compiles_no_step_of_tensorflow_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras would have it compiled there, but XLA compiles no collectives for GPUs."""
    tensorflow = pytest.importorskip("tensorflow")
    devices = [mock.Mock(device_type=kind) for kind in ("CPU", "GPU")]
    monkeypatch.setattr(tensorflow.config, "list_physical_devices", lambda kind=None: devices)
    given = estimator(None)
    alone = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    alone.compile(optimizer="sgd", loss="mse")
    if keras.backend.backend() == "tensorflow":
        assert alone.jit_compile is True
    assert compiled(given, monkeypatch).jit_compile is False


def half() -> Any:
    """A model that computes in float16."""
    layers = [keras.layers.Input((4,)), keras.layers.Dense(3, dtype="mixed_float16")]
    return keras.Sequential(layers)


def test_the_loss_of_a_model_in_float16_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    scaling = keras.mixed_precision.LossScaleOptimizer
    for optimizer in (keras.optimizers.SGD(RATE), scaling(keras.optimizers.SGD(RATE))):
        found = compiled(estimator(None, model=half(), optimizer=optimizer), monkeypatch).optimizer
        assert isinstance(found, scaling)
        assert isinstance(found.inner_optimizer, keras.optimizers.SGD)
        assert float(found.learning_rate) == pytest.approx(2 * RATE)
    schedule = keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9))
    with pytest.raises(ValueError, match="learning rate is a schedule"):
        estimator(None, model=half(), optimizer=scaling(schedule))._check()
    assert not isinstance(compiled(estimator(None), monkeypatch).optimizer, scaling)


def test_an_optimizer_of_the_program_is_scaled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(keras.optimizers.SGD):  # type: ignore[misc, unused-ignore]
        pass

    given = estimator(None, model=half(), optimizer=Own(RATE), custom_objects={"Own": Own})
    assert isinstance(compiled(given, monkeypatch).optimizer.inner_optimizer, Own)


def test_a_model_that_is_compiled_with_the_policy_of_float16_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """`compile` puts a LossScaleOptimizer around its optimizer. The processes that train have another policy."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
        model.compile(optimizer=keras.optimizers.SGD(RATE, momentum=0.9), loss="mse")
    finally:
        keras.mixed_precision.set_global_policy("float32")
    given = estimator(None, model=model, optimizer=None, loss=None, metrics=None)
    trained = compiled(given, monkeypatch)
    assert isinstance(trained.optimizer, keras.mixed_precision.LossScaleOptimizer)
    # A run that continues has the state of its checkpoint.
    trained.optimizer.build(trained.trainable_variables)
    trained.optimizer.inner_optimizer.momentums[0].assign(numpy.full((4, 3), 7.0))
    checkpoint = models.with_state(models.model_bytes(trained), trained.optimizer, {"epoch": 1})
    continued = compiled(given, monkeypatch, checkpoint).optimizer
    assert float(keras.ops.convert_to_numpy(continued.inner_optimizer.momentums[0]).min()) == 7.0
    assert float(continued.learning_rate) == pytest.approx(2 * RATE)
