"""Keras trains on several ranks as one process that has the data of all of them.

The argument is the module of ronde: ronde.keras, ronde.tensorflow.keras or horovod.keras.
"""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
import tempfile
import zipfile
from typing import Any

import numpy as np
from ronde.frameworks import objects

hvd: Any = importlib.import_module(sys.argv[1])
if sys.argv[1].endswith("tensorflow.keras"):
    import tensorflow as tf

    keras = tf.keras
else:
    import keras
VERSION = getattr(keras, "__version__", "2")
KERAS_2 = VERSION.startswith("2")
hvd.init(process_sets="dynamic")
RANK, SIZE = hvd.rank(), hvd.size()
BATCH, STEPS = 4, 6
DATA = np.random.default_rng(1).normal(size=(BATCH * STEPS * SIZE, 6)).astype("float32")
TARGET = (DATA @ np.arange(1.0, 7.0, dtype="float32")[:, None]) / 5
# A batch of one process has the rows of all ranks' batches.
MINE = np.concatenate([np.arange(RANK * BATCH, (RANK + 1) * BATCH) + step * BATCH * SIZE for step in range(STEPS)])


def model() -> Any:
    layers = keras.layers
    built = keras.Sequential([layers.Input((6,)), layers.Dense(5, activation="tanh"), layers.Dense(1)])
    generator = np.random.default_rng(3)
    built.set_weights([generator.normal(size=weight.shape) * 0.3 for weight in built.get_weights()])
    return built


def fit(trained: Any, rows: Any, batch: int, epochs: int = 1, callbacks: Any = ()) -> Any:
    options = {"batch_size": batch, "epochs": epochs, "shuffle": False, "verbose": 0}
    return trained.fit(DATA[rows], TARGET[rows], callbacks=list(callbacks), **options)


def alone(optimizer: Any, epochs: int = 1, batch: int = BATCH * SIZE) -> Any:
    """A model that one process has trained on all data."""
    trained = model()
    trained.compile(optimizer=optimizer, loss="mse")
    fit(trained, slice(None), batch, epochs)
    return trained


def same(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for each, other in zip(found.get_weights(), expected.get_weights()):
        np.testing.assert_allclose(each, other, rtol=tolerance, atol=tolerance)


def optimizers() -> list[Any]:
    kinds = [
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Adam(0.02, clipnorm=0.5),
        lambda: keras.optimizers.RMSprop(0.01),
    ]
    if KERAS_2:
        kinds.append(lambda: keras.optimizers.legacy.SGD(0.1, momentum=0.9))
    return kinds


def trains_as_one() -> None:
    for make in optimizers():
        trained = model()
        if RANK:
            trained.set_weights([weight + RANK for weight in trained.get_weights()])
        optimizer = hvd.DistributedOptimizer(make())
        trained.compile(optimizer=optimizer, loss="mse")
        # The first batch of ranks with other weights is lost: the callback broadcasts after it.
        fit(trained, MINE[:BATCH], BATCH, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        gathered = hvd.client().allgather(trained.get_weights()[0][None])
        assert all((each == gathered[0]).all() for each in gathered)
        trained = model()
        trained.compile(optimizer=hvd.DistributedOptimizer(make()), loss="mse")
        fit(trained, MINE, BATCH, 2)
        same(trained, alone(make(), 2))


def aggregates() -> None:
    """Two passes make a step, of a batch that is twice as large."""
    trained = model()
    kwargs = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), **kwargs)
    trained.compile(optimizer=optimizer, loss="mse")
    fit(trained, MINE, BATCH)
    same(trained, alone(keras.optimizers.SGD(0.1), batch=2 * BATCH * SIZE))
    assert int(np.asarray(optimizer.iterations)) == STEPS


def accumulates() -> None:
    """On JAX the optimizer itself adds passes. Those of ronde are refused."""
    trained = model()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    trained.compile(optimizer=optimizer, loss="mse")
    fit(trained, MINE, BATCH)
    same(trained, alone(keras.optimizers.SGD(0.1), batch=2 * BATCH * SIZE))
    try:
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), backward_passes_per_step=2)
    except NotImplementedError as error:
        assert "gradient_accumulation_steps=2" in str(error)
    else:
        raise AssertionError("passes were accepted on JAX")


def aggregates_what_is_there() -> None:
    """Passes, outside of `fit`, in which variables have no gradient."""
    variables = [tf.Variable([0.0]) if KERAS_2 else keras.Variable([0.0]) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    for values in [(RANK + 1.0, None), (None, 2.0), (None, 1.0), (None, RANK)]:
        gradients = [None if each is None else tensor_of([float(each)]) for each in values]
        optimizer.apply_gradients(list(zip(gradients, variables)))
    found = [float(value_of(each)[0]) for each in variables]
    np.testing.assert_allclose(found, [-(SIZE + 1) / 2, -3 - (SIZE - 1) / 2])


def tensor_of(value: Any) -> Any:
    return tf.constant(value) if KERAS_2 else keras.ops.convert_to_tensor(value, dtype="float32")


def value_of(variable: Any) -> Any:
    return variable.numpy() if KERAS_2 else keras.ops.convert_to_numpy(variable)


def in_a_process_set() -> None:
    """The ranks but the last train together, with the last layer local; the last rank trains alone."""
    some = hvd.add_process_set(list(range(SIZE - 1)))
    trained, mine = model(), model()
    before = trained.get_weights()
    optimizer = hvd.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1), local_layers=[trained.layers[-1]], process_set=some
    )
    trained.compile(optimizer=optimizer, loss="mse")
    mine.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    for each in (trained, mine):
        fit(each, MINE[:BATCH], BATCH)
    changes = [after - start for after, start in zip(mine.get_weights(), before)]
    everybodys = hvd.client().allgather(changes[0][None])
    is_inside = RANK < SIZE - 1
    wanted = everybodys[:-1].mean(0) if is_inside else changes[0]
    np.testing.assert_allclose(trained.get_weights()[0] - before[0], wanted, rtol=1e-4, atol=1e-6)
    local = changes[2] / (SIZE - 1 if is_inside else 1)
    np.testing.assert_allclose(trained.get_weights()[2] - before[2], local, rtol=1e-4, atol=1e-6)
    hvd.remove_process_set(some)


def local_variables() -> None:
    """A variable stays as it is, also if it is given by TensorFlow's object inside."""
    trained = model()
    trained.set_weights([weight * 0 + RANK for weight in trained.get_weights()])
    trained.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
    kept, inner = trained.trainable_variables[0], keras.backend.backend() == "tensorflow" and not KERAS_2
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(
        SIZE - 1, local_variables=[kept._value if inner else kept]
    )
    fit(trained, MINE[:BATCH], BATCH, callbacks=[callback])
    assert [float(weight.flat[0]) for weight in trained.get_weights()] == [RANK, SIZE - 1, SIZE - 1, SIZE - 1]


def scales_losses() -> None:
    """An infinite gradient of one rank makes all of them skip the step. A scale around our optimizer is refused."""
    keras.mixed_precision.set_global_policy("mixed_float16")
    finite = DATA[0].copy()
    DATA[0] = np.inf  # in the first batch of rank 0
    try:
        trained = model()
        trained.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
        try:
            fit(trained, MINE, BATCH)
        except ValueError as error:
            assert "mixed_bfloat16" in str(error), error
        else:
            raise AssertionError("a LossScaleOptimizer around a DistributedOptimizer was accepted")
        inside = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        trained = model()
        trained.compile(optimizer=hvd.DistributedOptimizer(inside), loss="mse")
        fit(trained, MINE, BATCH)
        steps = int(value_of(trained.optimizer.iterations))
        assert steps == STEPS if KERAS_2 else 0 < steps < STEPS, steps  # Keras 2 counts skipped steps
        assert (trained.get_weights()[0] != model().get_weights()[0]).any()
        everybodys = hvd.client().allgather(trained.get_weights()[0][None])
        assert np.isfinite(everybodys).all()
        assert all((each == everybodys[0]).all() for each in everybodys)
    finally:
        DATA[0] = finite
        keras.mixed_precision.set_global_policy("float32")


def excludes_from_weight_decay() -> None:
    """Variables that `exclude_from_weight_decay` names do not decay, also in an optimizer inside another one."""
    has_scale = KERAS_2 or keras.backend.backend() != "jax"  # on JAX its step is a part of a compiled program
    for is_scaled in (False, True) if has_scale else (False,):
        kind = tf.Variable if KERAS_2 else keras.Variable
        kernel, bias, named = (kind([1.0], name=name) for name in ("kernel", "bias", "named"))
        plain = keras.optimizers.AdamW(1e-3, weight_decay=0.1)
        plain.exclude_from_weight_decay(var_list=[named], var_names=["bias"])
        given = keras.mixed_precision.LossScaleOptimizer(plain) if is_scaled else plain
        optimizer = hvd.DistributedOptimizer(given)
        optimizer.apply_gradients([(tensor_of([0.0]), each) for each in (kernel, bias, named)])
        assert [float(value_of(each)[0]) for each in (bias, named)] == [1.0, 1.0]
        np.testing.assert_allclose(value_of(kernel), [1 - 1e-4], rtol=1e-6)


def saves_and_loads() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = str(pathlib.Path(folder) / ("model.h5" if KERAS_2 else "model.keras"))
        trained = model()
        trained.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), loss="mse")
        fit(trained, MINE, BATCH)
        trained.save(path)
        if not KERAS_2:
            saved = json.loads(zipfile.ZipFile(path).read("config.json"))["compile_config"]["optimizer"]
            assert (saved["class_name"], "ronde" in json.dumps(saved)) == ("Adam", False)
        loaded = hvd.load_model(path)
        assert type(loaded.optimizer).__name__ == "Adam"
        fit(loaded, MINE, BATCH)
        same(loaded, alone(keras.optimizers.Adam(0.02), 2))
        assert int(np.asarray(loaded.optimizer.iterations)) == 2 * STEPS
        loads_an_open_file(folder)
        plain = keras.models.load_model(path)  # as a program without ronde does
        same(plain, alone(keras.optimizers.Adam(0.02)))
        checkpoint = hvd.callbacks.BestModelCheckpoint(monitor="loss")
        try:
            fit(model_of(), MINE, BATCH, callbacks=[checkpoint])
        except ValueError as error:
            assert "filepath" in str(error)
        else:
            raise AssertionError("a checkpoint without a path was accepted")
        checkpoint.filepath = str(pathlib.Path(folder) / f"best{RANK}.{'h5' if KERAS_2 else 'keras'}")
        fit(model_of(), MINE, BATCH, callbacks=[checkpoint])
        assert os.path.exists(checkpoint.filepath)


def loads_an_open_file(folder: str) -> None:
    h5py: Any = importlib.import_module("h5py")
    trained = model()
    # Keras 3 cannot load the abbreviation "mse" from such a file.
    trained.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), loss=keras.losses.MeanSquaredError()
    )
    fit(trained, MINE, BATCH)
    path = str(pathlib.Path(folder) / "open.h5")
    trained.save(path)
    with h5py.File(path, "r") as file:
        loaded = hvd.load_model(file)
    same(loaded, trained)
    assert (type(loaded.optimizer).__name__, int(np.asarray(loaded.optimizer.iterations))) == ("Adam", STEPS)


def names() -> None:
    """Optimizers are named as Horovod names them, also one that has state."""
    plain = keras.optimizers.SGD(0.1)
    plain.build(model().trainable_variables)
    for given in (keras.optimizers.SGD(0.1), plain):
        assert hvd.DistributedOptimizer(given).name == "DistributedSGD"
        assert hvd.DistributedOptimizer(given, name="mine").name == "mine"


def variables_that_differ() -> None:
    """All ranks get the same words, and nobody waits."""
    other = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1 + RANK)])
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    try:
        callback.backend.broadcast_variables(other.variables, 0)
    except ValueError as error:
        assert "rank 1 has" in str(error), error
        assert len(set(objects.allgather_object(str(error), "words", hvd.global_process_set))) == 1
    else:
        raise AssertionError("variables that differ were accepted")
    values()


def returns_tensors() -> None:
    """On TensorFlow, Horovod's module returns what TensorFlow's collectives return."""
    if not sys.argv[1].startswith("horovod") or (not KERAS_2 and keras.backend.backend() != "tensorflow"):
        return
    for found in (hvd.allreduce(1.0), hvd.allgather([1.0]), hvd.broadcast([1.0], 0), hvd.reducescatter([1.0] * SIZE)):
        assert found.numpy().dtype == "float32"
    assert hvd.allreduce(float(RANK), average=True).numpy() == (SIZE - 1) / 2


def model_of() -> Any:
    trained = model()
    trained.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), loss="mse")
    return trained


def rates_and_metrics() -> None:
    trained = model()
    trained.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.4, momentum=0.5)), loss="mse")
    rates: list[float] = []

    class Rates(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            getattr(trained, "jax_state_sync", lambda: None)()  # with JAX, its program has the variables in `fit`
            rates.append(float(np.asarray(trained.optimizer.learning_rate)))

    callbacks = [
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1),
        hvd.callbacks.LearningRateScheduleCallback(0.4, multiplier=0.1, start_epoch=2, end_epoch=3),
        hvd.callbacks.LearningRateScheduleCallback(0.4, multiplier=lambda epoch: 0.1 / epoch, start_epoch=3),
        Rates(),
    ]
    history = fit(trained, MINE, BATCH, 5, callbacks).history
    warm = [0.4 / SIZE * ((number + 1) / STEPS * (SIZE - 1) / 2 + 1) for number in range(2 * STEPS)]
    later = [0.04] * STEPS + [0.4 * 0.1 / 3] * STEPS + [0.4 * 0.1 / 4] * STEPS
    np.testing.assert_allclose(rates, warm + later, rtol=1e-5)
    np.testing.assert_allclose(history["lr"], [rates[STEPS * number - 1] for number in range(1, 6)], rtol=1e-5)
    everybodys = hvd.client().allgather(np.array([history["loss"]]))
    assert (everybodys == everybodys[0]).all()
    for wrong in (lambda: hvd.callbacks.LearningRateScheduleCallback(None, 1.0),):
        try:
            wrong()
        except ValueError as error:
            assert "initial_lr" in str(error)
        else:
            raise AssertionError("a schedule without a rate was accepted")


def corrects_momentum() -> None:
    """A rate that is twice as large doubles the momentum, also that of an optimizer in a LossScaleOptimizer."""
    for is_scaled in (False, True):
        sgd = keras.optimizers.SGD(0.1, momentum=0.9)
        given = keras.mixed_precision.LossScaleOptimizer(sgd) if is_scaled else sgd
        trained = model()
        trained.compile(optimizer=hvd.DistributedOptimizer(given), loss="mse")
        fit(trained, MINE, BATCH)
        inner = getattr(trained.optimizer, "inner_optimizer", trained.optimizer)
        before = [np.array(value_of(each)) for each in inner.momentums]
        schedule = hvd.callbacks.LearningRateScheduleCallback(0.2, multiplier=1.0)
        schedule.set_model(trained)
        schedule.on_train_batch_begin(0)
        for found, each in zip(inner.momentums, before):
            assert np.abs(each).max() > 0
            np.testing.assert_allclose(value_of(found), 2 * each, rtol=1e-5)


def embeds() -> None:
    """Gradients of an embedding. On TensorFlow they are slices: rows of all ranks, or converted to a tensor."""
    words = (np.arange(len(DATA)) * 7 % 11)[:, None]

    def trained_by(optimizer: Any, rows: Any, batch: int) -> Any:
        layers = keras.layers
        made = keras.Sequential([layers.Input((1,)), layers.Embedding(11, 3), layers.Flatten(), layers.Dense(1)])
        generator = np.random.default_rng(3)
        made.set_weights([generator.normal(size=weight.shape) * 0.3 for weight in made.get_weights()])
        made.compile(optimizer=optimizer, loss="mse")
        made.fit(words[rows], TARGET[rows], batch_size=batch, shuffle=False, verbose=0)
        return made

    expected = trained_by(keras.optimizers.SGD(0.1), slice(None), BATCH * SIZE)
    for is_dense in (True, False):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), sparse_as_dense=is_dense)
        same(trained_by(optimizer, MINE, BATCH), expected)


def values() -> None:
    mine = np.full((2, 3), float(RANK), dtype="float32")
    np.testing.assert_allclose(hvd.allreduce(mine), (SIZE - 1) / 2)
    np.testing.assert_allclose(hvd.allreduce(mine, op=hvd.Sum), (SIZE - 1) / 2 * SIZE)
    assert hvd.allgather(mine[: RANK + 1]).shape == (sum(min(rank + 1, 2) for rank in range(SIZE)), 3)
    np.testing.assert_allclose(hvd.broadcast(mine, SIZE - 1), SIZE - 1)
    assert hvd.reducescatter(mine).shape == (len(np.array_split(np.zeros(2), SIZE)[RANK]), 3)


def local_layers() -> None:
    """The gradients of a local layer stay, divided by the number of ranks."""
    trained = model()
    before = trained.get_weights()
    local = trained.layers[-1]
    optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[local])
    trained.compile(optimizer=optimizer, loss="mse")
    fit(trained, MINE[:BATCH], BATCH)
    mine = model()
    mine.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse")
    fit(mine, MINE[:BATCH], BATCH)
    change = (mine.get_weights()[2] - before[2]) / SIZE
    np.testing.assert_allclose(trained.get_weights()[2] - before[2], change, rtol=1e-4, atol=1e-6)
    everybodys = hvd.client().allgather(trained.get_weights()[0][None])
    assert all((each == everybodys[0]).all() for each in everybodys)


def states_of_new_workers() -> None:
    """Rank 0 has trained; the optimizers of the others have no variables of their own yet."""
    for make in optimizers():
        trained, optimizer = model(), make()
        if RANK == 0:
            trained.compile(optimizer=optimizer, loss="mse")
            fit(trained, slice(BATCH), BATCH)
        state = hvd.elastic.KerasState(trained, optimizer, batch=RANK)
        state.sync()
        assert state.batch == 0
        values = [np.asarray(value_of(each)).ravel() for each in state._variables()]
        gathered = hvd.client().allgather(np.concatenate([each.astype("float64") for each in values])[None])
        assert len(values) > len(trained.weights)
        assert all((each == gathered[0]).all() for each in gathered)


def refusals() -> None:
    for wrong, words in [
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), op=2), "only supports Average and Sum"),
        (lambda: hvd.DistributedOptimizer(3), "is no optimizer"),
        (lambda: hvd.DistributedOptimizer(hvd.DistributedOptimizer(keras.optimizers.SGD())), "wrap it once"),
        (lambda: hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[3]), "local variables"),
        (lambda: hvd.PartialDistributedOptimizer(keras.optimizers.SGD(), local_layers=[3]), "local layers"),
        (lambda: hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)])), "must be built first"),
        (lambda: hvd.DistributedOptimizer(keras.optimizers.SGD(), num_groups=1, groups=[[]]), "groups"),
    ]:
        try:
            wrong()
        except (ValueError, NotImplementedError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)


PARTS = [
    trains_as_one,
    *([accumulates] if not KERAS_2 and keras.backend.backend() == "jax" else [aggregates, aggregates_what_is_there]),
    excludes_from_weight_decay,
    saves_and_loads,
    names,
    embeds,
    rates_and_metrics,
    *([] if keras.backend.backend() == "jax" else [corrects_momentum]),  # a scale is for the other back ends
    values,
    variables_that_differ,
    returns_tensors,
    local_layers,
    local_variables,
    in_a_process_set,
    scales_losses,
    states_of_new_workers,
    refusals,
]
for part in PARTS:
    if not sys.argv[2:] or part.__name__ in sys.argv[2:]:
        part()
print(f"rank {RANK}: Keras {VERSION} trains as one process", flush=True)
