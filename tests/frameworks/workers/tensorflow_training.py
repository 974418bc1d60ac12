"""Tapes and optimizers of ronde.tensorflow train as one process that has the data of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import ronde.tensorflow as hvd
import tensorflow as tf

tf.get_logger().setLevel("ERROR")  # of functions that are traced often

hvd.init(process_sets="dynamic")
RANK, SIZE = hvd.rank(), hvd.size()
DATA = np.random.default_rng(1).normal(size=(8 * SIZE, 5)).astype(np.float64)
TARGET = DATA @ np.arange(1.0, 6.0)[:, None]
START = np.random.default_rng(2).normal(size=(5, 1))


def loss_of(weight: Any, bias: Any, mine: slice) -> Any:
    return tf.reduce_mean((tf.constant(DATA[mine]) @ weight + bias - tf.constant(TARGET[mine])) ** 2)


def expected(weight: Any, bias: Any) -> list[Any]:
    """The gradients of the mean over all data."""
    with tf.GradientTape() as tape:
        loss = loss_of(weight, bias, slice(None))
    return tape.gradient(loss, [weight, bias])


MINE = slice(RANK, None, SIZE)


def tapes() -> None:
    weight, bias = tf.Variable(START), tf.Variable([0.5], dtype=tf.float64)
    wanted = expected(weight, bias)
    unused = tf.Variable(1.0)
    for options in [
        {},
        {"num_groups": 1},
        {"num_groups": 2},
        {"groups": [[weight, bias]]},
        {"gradient_predivide_factor": float(SIZE)},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16},
    ]:
        for run in (lambda function: function, tf.function):

            def step(options: dict[str, Any] = options) -> Any:
                with tf.GradientTape() as tape:
                    loss = loss_of(weight, bias, MINE)
                tape = hvd.DistributedGradientTape(tape, **options)
                return tape.gradient(loss, [weight, bias, unused])

            found = run(step)()
            assert found[2] is None
            tolerance = {"rtol": 2e-2, "atol": 0.2} if "compression" in options else {"rtol": 1e-12}
            for each, other in zip(found, wanted):
                np.testing.assert_allclose(each, other, **tolerance)
    with hvd.DistributedGradientTape(tf.GradientTape(persistent=True), op=hvd.Sum) as tape:
        loss = loss_of(weight, bias, MINE)
    for _ in range(2):
        np.testing.assert_allclose(tape.gradient(loss, {"w": weight})["w"], wanted[0] * SIZE, rtol=1e-12)


def several_tapes_of_one() -> None:
    """Each has its own options. A tape that is distributed already is refused."""
    weight = tf.Variable(1.0)
    with tf.GradientTape(persistent=True) as tape:
        loss = weight * (RANK + 1.0)
    sums = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    means = hvd.DistributedGradientTape(tape)
    local = hvd.PartialDistributedGradientTape(tape, scale_local_gradients=False)
    local.register_local_source(weight)
    total = SIZE * (SIZE + 1) / 2
    for _ in range(2):
        found = [float(each.gradient(loss, weight)) for each in (sums, means, local, tape)]
        np.testing.assert_allclose(found, [total, total / SIZE, RANK + 1, RANK + 1], rtol=1e-6)
    for wrap in (hvd.DistributedGradientTape, hvd.PartialDistributedGradientTape):
        try:
            wrap(sums)
        except ValueError as error:
            assert "wrap it once" in str(error), error
        else:
            raise AssertionError("a distributed tape was wrapped")


class FailsFirst(hvd.Compression.none):  # type: ignore[misc]
    """A compressor whose first call fails."""

    calls = 0

    @classmethod
    def compress(cls, tensor: Any) -> Any:
        cls.calls += 1
        if cls.calls == 1:
            raise RuntimeError("the first call fails")
        return super().compress(tensor)


def steps_after_a_failed_reduction() -> None:
    """Its two passes are lost. The later ones are those of one process with the data of all ranks."""
    if SIZE == 1:
        return  # then nothing is reduced
    variable, failures = tf.Variable(0.0), 0
    plain = tf.keras.optimizers.SGD(1.0)
    optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=2, compression=FailsFirst)
    for value in (100.0, 100.0, 1.0, 2.0, 3.0, 4.0):
        try:
            optimizer.apply_gradients([(tf.constant(value * (RANK + 1)), variable)])
        except RuntimeError:
            failures += 1
    assert failures == 1, failures
    np.testing.assert_allclose(variable.numpy(), -(1 + 2 + 3 + 4) * (SIZE + 1) / 2, rtol=1e-6)


def local_sources() -> None:
    layer, other = tf.keras.layers.Dense(1), tf.keras.layers.Dense(1)
    for each in (layer, other):
        each.build((None, 2))
    variables = [*layer.trainable_variables, *other.trainable_variables]
    for scaled in (True, False):
        with tf.GradientTape() as tape:
            loss = sum(tf.reduce_sum(each) for each in variables) * float(RANK + 1)
        tape = hvd.PartialDistributedGradientTape(tape, local_layers=layer, scale_local_gradients=scaled)
        found = tape.gradient(loss, variables)
        mine = (RANK + 1) / (SIZE if scaled else 1)
        np.testing.assert_allclose(found[0], np.full((2, 1), mine), rtol=1e-6)
        np.testing.assert_allclose(found[2], np.full((2, 1), (SIZE + 1) / 2), rtol=1e-6)
    try:
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[3])
    except ValueError as error:
        assert "all local layers must be of type" in str(error)
    else:
        raise AssertionError("3 is no layer")


def sparse() -> None:
    table = tf.Variable(np.ones((4, 2)))
    for as_dense in (False, True):

        def step(as_dense: bool = as_dense) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.gather(table, [RANK, 3]))
            tape = hvd.DistributedGradientTape(tape, sparse_as_dense=as_dense)
            return tape.gradient(loss, table)

        wanted = np.zeros((4, 2))
        for rank in range(SIZE):
            wanted[rank] += 1 / SIZE
            wanted[3] += 1 / SIZE
        for found in (step(), tf.function(step)()):
            assert isinstance(found, tf.IndexedSlices) is not as_dense
            np.testing.assert_allclose(tf.convert_to_tensor(found), wanted, rtol=1e-12)


def sparse_in_a_process_set() -> None:
    """Slices of the ranks but the first, with a division before the reduction, which slices are without."""
    if SIZE < 3:
        return
    some = hvd.add_process_set(list(range(1, SIZE)))
    table = tf.Variable(np.ones((SIZE, 2)))

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [RANK])) * (RANK + 1.0)
        tape = hvd.DistributedGradientTape(tape, process_set=some, gradient_predivide_factor=2.0)
        return tape.gradient(loss, table)

    wanted = np.zeros((SIZE, 2))
    for rank in [0] if RANK == 0 else range(1, SIZE):
        wanted[rank] = (rank + 1) / (1 if RANK == 0 else SIZE - 1)
    for found in (step(), tf.function(step)()):
        np.testing.assert_allclose(tf.convert_to_tensor(found), wanted, rtol=1e-12)


def starts_equal() -> None:
    kinds = [tf.float32, tf.float16, tf.int64, tf.bool, tf.uint32, tf.complex64]
    variables = [tf.Variable(tf.cast([RANK, 1], kind)) for kind in kinds] + [tf.Variable(tf.zeros([0, 3]))]
    hvd.broadcast_variables(variables, root_rank=SIZE - 1)
    for each, kind in zip(variables, kinds):
        np.testing.assert_array_equal(each.numpy(), tf.cast([SIZE - 1, 1], kind).numpy())
    many = [tf.Variable(tf.fill([1 << 20], float(RANK))) for _ in range(20)]  # more than a window
    hvd.broadcast_variables(many, root_rank=0)
    assert all(not each.numpy().any() for each in many)
    mine = tf.Variable([float(RANK)])
    tf.function(lambda: hvd.broadcast_variables([mine], 0))()
    assert mine.numpy() == [0.0]
    assert hvd.broadcast_([mine], 0)[0] is mine


def batch_normalization() -> None:
    """Of ragged batches: the mean and variance of all of them, and their gradient."""
    batches = [np.random.default_rng(10 + rank).normal(size=(2 + rank, 3, 2)) * 3 + 100 for rank in range(SIZE)]
    everything = np.concatenate(batches).astype(np.float32)
    plain, synchronized = tf.keras.layers.BatchNormalization(), hvd.SyncBatchNormalization()
    given, mine = tf.constant(everything), tf.constant(batches[RANK].astype(np.float32))
    first = sum(len(batch) for batch in batches[:RANK])
    own = slice(first, first + len(batches[RANK]))
    with tf.GradientTape() as tape:
        tape.watch(given)
        alone = plain(given, training=True)
        loss = tf.reduce_sum(alone**3)
    wanted = tape.gradient(loss, given)[own]

    @tf.function
    def together(mine: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(mine)
            found = synchronized(mine, training=True)
            loss = tf.reduce_sum(found**3)
        return found, tape.gradient(loss, mine)

    found, gradient = together(mine)
    np.testing.assert_allclose(found, alone[own], atol=2e-4)
    np.testing.assert_allclose(gradient, wanted, atol=2e-2)
    np.testing.assert_allclose(synchronized.moving_mean, plain.moving_mean, rtol=1e-5)
    np.testing.assert_allclose(synchronized.moving_variance, plain.moving_variance, rtol=1e-4)
    np.testing.assert_allclose(synchronized(mine), plain(mine), atol=1e-3)
    for fused in (True, None):
        try:
            hvd.SyncBatchNormalization(fused=fused)
        except ValueError as error:
            assert "fused=True" in str(error)
        else:
            raise AssertionError("a fused kernel does not synchronize")


PARTS = (
    tapes,
    several_tapes_of_one,
    steps_after_a_failed_reduction,
    local_sources,
    sparse,
    sparse_in_a_process_set,
    starts_equal,
    batch_normalization,
)
for part in PARTS:
    part()
print(f"rank {RANK}: trained as one process", flush=True)
