"""tf-keras in a session of TensorFlow 1: `fit` trains as one process, also an embedding, whose gradients are slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_eager_execution()

import horovod.tensorflow.keras as hvd  # noqa: E402

keras = tf.keras
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
BATCH, STEPS, WORDS = 4, 5, 11
INPUTS = (np.arange(BATCH * STEPS * SIZE) * 7 % WORDS)[:, None]
TARGETS = np.cos(INPUTS.astype("float32"))
# A batch of one process has the rows of all ranks' batches.
MINE = np.concatenate([np.arange(RANK * BATCH, (RANK + 1) * BATCH) + step * BATCH * SIZE for step in range(STEPS)])


def model(optimizer: Any, seed: int = 3) -> Any:
    layers = keras.layers
    made = keras.Sequential([layers.Embedding(WORDS, 3, input_length=1), layers.Flatten(), layers.Dense(1)])
    generator = np.random.default_rng(seed)
    made.set_weights([generator.normal(size=weight.shape) for weight in made.get_weights()])
    made.compile(optimizer=optimizer, loss="mse")
    return made


def fit(trained: Any, rows: Any, batch: int, callbacks: Any = ()) -> Any:
    options = {"batch_size": batch, "epochs": 2, "shuffle": False, "verbose": 0}
    return trained.fit(INPUTS[rows], TARGETS[rows], callbacks=list(callbacks), **options).history


def same(found: Any, expected: Any) -> None:
    for each, other in zip(found.get_weights(), expected.get_weights()):
        np.testing.assert_allclose(each, other, rtol=1e-5, atol=1e-6)


def trains_as_one() -> None:
    for make in (lambda: keras.optimizers.SGD(0.1), lambda: keras.optimizers.Adam(0.02)):
        expected = model(make())
        fit(expected, slice(None), BATCH * SIZE)
        for is_dense in (False, True):
            found = model(hvd.DistributedOptimizer(make(), sparse_as_dense=is_dense))
            fit(found, MINE, BATCH)
            same(found, expected)


def starts_equal() -> None:
    """Ranks with other weights have the same ones after the first batch, and metrics of all of them."""
    trained = model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)), seed=RANK)
    warm_up = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.01, warmup_epochs=1)
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback(), warm_up]
    history = fit(trained, MINE, BATCH, callbacks)
    for weight in [*trained.get_weights(), np.array(history["loss"])]:
        everybodys = hvd.allgather(weight[None])
        assert all((each == everybodys[0]).all() for each in everybodys)
    np.testing.assert_allclose(history["lr"][-1], 0.01, rtol=1e-6)


def corrects_momentum() -> None:
    """A rate that is twice as large doubles the momentum, too."""
    trained = model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)))
    fit(trained, MINE, BATCH)
    session = keras.backend.get_session()
    momenta = [slots["momentum"] for slots in trained.optimizer._slots.values()]
    before = session.run(momenta)
    schedule = hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.02, multiplier=1.0)
    schedule.set_model(trained)
    schedule.on_train_batch_begin(0)
    for found, each in zip(session.run(momenta), before):
        assert np.abs(each).max() > 0
        np.testing.assert_allclose(found, 2 * each, rtol=1e-5)
    assert keras.backend.get_value(trained.optimizer.learning_rate) == np.float32(0.02)


def values() -> None:
    """Results are those of the session, as arrays."""
    assert hvd.allreduce(float(RANK), average=True) == (SIZE - 1) / 2
    assert hvd.allreduce([float(RANK)], op=hvd.Sum, name="sum").tolist() == [SIZE * (SIZE - 1) / 2]
    assert hvd.allgather([RANK]).tolist() == list(range(SIZE))
    assert hvd.broadcast([RANK], root_rank=SIZE - 1).tolist() == [SIZE - 1]
    variable = tf.get_variable("mine", initializer=float(RANK))
    session = keras.backend.get_session()
    session.run(variable.initializer)
    hvd.broadcast_global_variables(SIZE - 1)
    assert session.run(variable) == SIZE - 1


def elastic_state() -> None:
    """A state contains the variables of the model and of its optimizer, in the session of Keras."""
    trained = model(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01, momentum=0.9)), seed=RANK)
    state = hvd.elastic.KerasState(trained, epoch=RANK)
    state.sync()
    assert state.epoch == 0
    same(trained, model(keras.optimizers.SGD(0.01), seed=0))
    session, momenta = keras.backend.get_session(), [each["momentum"] for each in trained.optimizer._slots.values()]
    fit(trained, MINE, BATCH)
    kept, kept_momenta = trained.get_weights(), session.run(momenta)
    assert all(np.abs(each).max() > 0 for each in kept_momenta)
    state.epoch = 7
    state.commit()
    fit(trained, MINE, BATCH)
    state.epoch = 9
    assert (trained.get_weights()[0] != kept[0]).any()
    state.restore()
    assert state.epoch == 7
    for found, each in zip([*trained.get_weights(), *session.run(momenta)], [*kept, *kept_momenta]):
        np.testing.assert_array_equal(found, each)
    state.sync()
    nodes = len(session.graph.get_operations())
    state.sync()
    assert len(session.graph.get_operations()) == nodes


for part in (trains_as_one, starts_equal, corrects_momentum, values, elastic_state):
    keras.backend.clear_session()
    config = tf.ConfigProto()
    config.gpu_options.visible_device_list = str(hvd.local_rank())
    keras.backend.set_session(tf.Session(config=config))
    part()
print(f"rank {RANK}: Keras trains in a session", flush=True)
