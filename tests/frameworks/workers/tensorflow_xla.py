"""All-reduces in functions with jit_compile=True, compared with NumPy and with a training of one process.

With the argument "refused" TensorFlow's library is somewhere else, so they cannot be compiled.
"""

from __future__ import annotations

import re
import sys
from typing import Any, Callable

import keras
import numpy as np
import ronde.tensorflow as hvd
import tensorflow as tf

tf.get_logger().setLevel("ERROR")


def compiled(function: Callable[..., Any]) -> Any:
    return tf.function(function, jit_compile=True, autograph=False)


def fails(kind: Any, call: Callable[[], Any]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind} was raised")


def everybodys(make: Callable[[int], Any]) -> np.ndarray[Any, Any]:
    return np.stack([make(rank) for rank in range(hvd.size())])


def before_init() -> None:
    assert "use hvd.init()" in fails(ValueError, lambda: compiled(hvd.allreduce)(tf.ones(1)))


def values() -> None:
    for dtype in ("uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"):

        def make(rank: int, dtype: str = dtype) -> Any:
            return (np.arange(6).reshape(2, 3) + rank).astype(tf.as_dtype(dtype).as_numpy_dtype)

        found = compiled(lambda tensor: hvd.allreduce(tensor, op=hvd.Sum, name="sum"))(make(hvd.rank()))
        assert found.dtype.name == dtype
        np.testing.assert_array_equal(found, everybodys(make).sum(0).astype(found.numpy().dtype))
    ranks = np.arange(hvd.size(), dtype="float64")
    for op, expected in [(hvd.Average, ranks.mean()), (hvd.Min, 0), (hvd.Max, hvd.size() - 1), (hvd.Product, 0)]:
        np.testing.assert_allclose(compiled(lambda x, op=op: hvd.allreduce(x, op=op))(float(hvd.rank())), expected)
    scaled = compiled(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.1, postscale_factor=3.0))
    np.testing.assert_allclose(scaled(tf.ones([2], tf.float64)), [0.1 * hvd.size() * 3.0] * 2, rtol=1e-15)
    np.testing.assert_array_equal(compiled(lambda x: hvd.allreduce(x, name="größe"))(tf.ones(1)), [1.0])
    halves = compiled(lambda x: hvd.allreduce(x, compression=hvd.Compression.fp16))
    np.testing.assert_array_equal(halves(tf.fill([3], 0.5)), [0.5] * 3)
    np.testing.assert_array_equal(compiled(hvd.allreduce)(tf.zeros([0, 4])), np.zeros([0, 4]))
    bools = compiled(lambda x: hvd.allreduce(x, op=hvd.Max))(tf.constant([hvd.rank() == 0, False]))
    np.testing.assert_array_equal(bools, [True, False])


def many() -> None:
    """Many calls of one function, in order; groups; one whose result nothing uses; loops and branches."""

    @compiled
    def step(tensor: Any) -> Any:
        found = [hvd.allreduce(tensor + float(index), op=hvd.Sum) for index in range(30)]
        hvd.allreduce(tensor, name="unused")
        grouped = hvd.grouped_allreduce([tensor, tf.cast(tensor, tf.int32)[:1]], op=hvd.Max)
        _, last = tf.while_loop(
            lambda turn, _: turn < 4,
            lambda turn, x: (turn + 1, hvd.allreduce(x, op=hvd.Sum, name="turn")),
            (tf.constant(0), tensor),
        )
        branch = tf.cond(
            tensor[0] >= 0, lambda: hvd.allreduce(tensor, name="yes"), lambda: hvd.allreduce(-tensor, name="no")
        )
        return tf.stack(found), grouped, last, branch

    for _ in range(3):
        found, grouped, last, branch = step(tf.fill([1000], float(hvd.rank())))
        total = sum(range(hvd.size()))
        expected = [np.full(1000, total + index * hvd.size()) for index in range(30)]
        np.testing.assert_allclose(found, expected)
        np.testing.assert_array_equal(grouped[0], np.full(1000, hvd.size() - 1))
        np.testing.assert_array_equal(grouped[1], [hvd.size() - 1])
        np.testing.assert_allclose(last, np.full(1000, total * hvd.size() ** 3))
        np.testing.assert_allclose(branch, np.full(1000, total / hvd.size()))


def gradients() -> None:
    @compiled
    def step(tensor: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            first, second = hvd.grouped_allreduce([tensor, 2.0 * tensor], op=hvd.Average)
            loss = tf.reduce_sum(hvd.allreduce(tensor, op=hvd.Sum) * (hvd.rank() + 1.0)) + tf.reduce_sum(first + second)
        return tape.gradient(loss, tensor)

    found = step(tf.constant([1.0, 2.0]))
    np.testing.assert_allclose(found, [sum(range(1, hvd.size() + 1)) + 3.0] * 2)


def trained(rows: Any, is_distributed: bool, jit_compile: bool, options: dict[str, Any]) -> list[Any]:
    """The weights after some steps of a model that starts the same everywhere."""
    tf.keras.utils.set_random_seed(1)
    model = tf.keras.Sequential(
        [tf.keras.layers.Input((6,)), tf.keras.layers.Dense(5, "tanh"), tf.keras.layers.Dense(1)]
    )
    optimizer = tf.keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=jit_compile)
    def step(batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(batch) - tf.reduce_sum(batch, 1, keepdims=True)) ** 2)
        if is_distributed:
            tape = hvd.DistributedGradientTape(tape, **options)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    for batch in rows:
        step(batch)
    return [np.asarray(weight) for weight in model.get_weights()]


def trains_as_one() -> None:
    batches = np.random.default_rng(1).normal(size=(8, 4 * hvd.size(), 6)).astype("float32")
    expected = trained(batches, False, False, {})
    options: list[dict[str, Any]] = [{}, {"num_groups": 2}, {"gradient_predivide_factor": 2.0}]
    for each in options:
        found = trained(batches[:, hvd.rank() :: hvd.size()], True, True, each)
        for mine, other in zip(found, expected):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-5)
        assert len(set(hvd.allgather_object([weight.tobytes() for weight in found].__repr__()))) == 1


def fits() -> None:
    """Keras' `fit` with jit_compile=True."""
    import ronde.tensorflow.keras as hvd_keras

    rows = np.random.default_rng(1).normal(size=(48 * hvd.size(), 6)).astype("float32")
    mine = np.concatenate([np.arange(4) + 4 * (hvd.size() * step + hvd.rank()) for step in range(12)])
    weights = []
    for optimizer, chosen, size in [
        (hvd_keras.DistributedOptimizer(keras.optimizers.Adam(0.02)), mine, 4),
        (keras.optimizers.Adam(0.02), np.arange(len(rows)), 4 * hvd.size()),
    ]:
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
        model.compile(optimizer=optimizer, loss="mse", jit_compile=True)
        model.fit(rows[chosen], rows[chosen].sum(1), batch_size=size, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for found, expected in zip(*weights):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def errors() -> None:
    rank = hvd.rank()
    bad = compiled(lambda tensor: hvd.allreduce(tensor, name="shapes"))
    text = fails(tf.errors.InvalidArgumentError, lambda: bad(tf.ones(rank + 1)))
    words = re.search(r"Mismatched ALLREDUCE tensor shapes.*?\(rank 0: .*?\)", text)
    assert words, text
    assert len(set(hvd.allgather_object(words.group(0)))) == 1
    np.testing.assert_array_equal(compiled(lambda x: hvd.allreduce(x, op=hvd.Sum))(tf.ones(2)), [hvd.size()] * 2)
    for call in (
        lambda: hvd.allgather(tf.ones(2)),
        lambda: hvd.broadcast(tf.ones(2), 0),
        lambda: hvd.alltoall(tf.ones(hvd.size())),
        lambda: hvd.reducescatter(tf.ones(2)),
        hvd.barrier,
        hvd.size_op,
        lambda: hvd.allreduce(tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))),
    ):
        text = fails(NotImplementedError, lambda call=call: compiled(lambda: call() and 1)())
        assert "jit_compile=True" in text, text
    unknown = tf.function(hvd.allreduce, jit_compile=True, input_signature=[tf.TensorSpec([None], tf.float32)])
    assert "all dimensions" in fails(ValueError, lambda: unknown(tf.ones(3)))


def sessions() -> None:
    """A compiled function outlives its session, and works in the next one."""
    step = compiled(lambda tensor: hvd.allreduce(tensor, op=hvd.Sum, name="again"))
    np.testing.assert_array_equal(step(tf.ones(1)), [hvd.size()])
    size = hvd.size()
    hvd.shutdown()
    assert "no open session" in fails(tf.errors.FailedPreconditionError, lambda: step(tf.ones(1)))
    hvd.init()
    np.testing.assert_array_equal(step(tf.ones(1)), [size])


def refused() -> None:
    """A TensorFlow without XLA's table is named with the reason. The same function works without compilation."""
    tf.sysconfig.get_lib = lambda: "/nowhere"
    assert "has not loaded /nowhere" in fails(NotImplementedError, lambda: compiled(hvd.allreduce)(tf.ones(2)))
    np.testing.assert_array_equal(tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))(tf.ones(2)), [hvd.size()] * 2)
    text = fails(NotImplementedError, lambda: compiled(hvd.allreduce)(tf.ones(2)))
    assert re.search(r"cannot have collectives with TensorFlow .*Install a release of TensorFlow 2\.", text), text


PARTS = [values, many, gradients, trains_as_one, fits, errors, sessions]
before_init()
hvd.init()
for part in [refused] if sys.argv[1:] == ["refused"] else PARTS:
    if part is refused or not sys.argv[1:] or part.__name__ in sys.argv[1:]:
        part()
print(f"rank {hvd.rank()}: compiled functions are right", flush=True)
