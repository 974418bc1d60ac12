"""Loops and functions within others, the end of a session with operations in flight, empty batches, barriers."""

from __future__ import annotations

import os
import pathlib
import sys
import threading
import time
from typing import Any

import numpy as np
import ronde.tensorflow as hvd
import tensorflow as tf
from ronde.tensorflow import native

tf.get_logger().setLevel("ERROR")
tf.config.threading.set_inter_op_parallelism_threads(8)
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def the_self_test_runs_when_a_graph_is_traced() -> None:
    tf.function(hvd.allreduce).get_concrete_function(tf.ones(1))
    assert native._SelfTest.has_passed


def loops_within_loops() -> None:
    """In graphs of TensorFlow 1, outer iterations run at the same time, and in another order on each rank."""
    v1 = tf.compat.v1

    def wait(outer: Any) -> Any:
        time.sleep(0.3 * (int(outer) if RANK % 2 else 2 - int(outer)))
        return outer

    def outer_body(outer: Any, total: Any) -> Any:
        late = tf.ensure_shape(v1.py_func(wait, [outer], tf.int32, stateful=False), [])

        def inner_body(inner: Any, part: Any) -> Any:
            value = hvd.allreduce(10 * late + inner, op=hvd.Sum, name="nested")
            return inner + 1, part + value * (1 + 2 * outer + inner) ** 2

        return outer + 1, total + v1.while_loop(lambda inner, _: inner < 2, inner_body, (0, 0))[1]

    v1.disable_control_flow_v2()
    config = v1.ConfigProto(inter_op_parallelism_threads=8)
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        found = session.run(v1.while_loop(lambda outer, _: outer < 3, outer_body, (0, 0))[1])
    v1.enable_control_flow_v2()
    pairs = [(outer, inner) for outer in range(3) for inner in range(2)]
    assert found == sum(SIZE * (10 * outer + inner) * (1 + 2 * outer + inner) ** 2 for outer, inner in pairs), found


def gradients_of_groups_with_integers() -> None:
    for call, wanted in (
        (lambda tensors: hvd.grouped_allreduce(tensors, op=hvd.Sum, name="reduced"), SIZE),
        (lambda tensors: hvd.grouped_allgather(tensors, name="gathered"), 1),
        (lambda tensors: hvd.grouped_reducescatter(tensors, op=hvd.Sum, name="scattered"), SIZE),
    ):
        given = tf.ones(SIZE)
        with tf.GradientTape() as tape:
            tape.watch(given)
            # Recorded outside of the function, which gives integers no gradients.
            loss = tf.reduce_sum(tf.function(lambda tensor, call=call: call([tensor, tf.range(SIZE)])[0])(given))
        np.testing.assert_allclose(tape.gradient(loss, given), [wanted] * SIZE)


def an_empty_batch() -> None:
    """It changes nothing: statistics and gradients are those of the other ranks."""
    given = np.random.default_rng(1).normal(size=(4 * (SIZE - 1), 3)).astype("float32")
    mine = tf.constant(given[4 * RANK : 4 * RANK + 4])
    plain, synchronized = tf.keras.layers.BatchNormalization(), hvd.SyncBatchNormalization()
    gradients = []
    for layer, batch in ((plain, tf.constant(given)), (synchronized, mine)):
        with tf.GradientTape() as tape:
            tape.watch(batch)
            loss = tf.reduce_sum(layer(batch, training=True) ** 3)
        gradients.append(tape.gradient(loss, batch))
    wanted, found = gradients[0][4 * RANK : 4 * RANK + 4], gradients[1]
    np.testing.assert_allclose(synchronized.moving_variance, plain.moving_variance, rtol=1e-5)
    np.testing.assert_allclose(found, wanted, atol=1e-3)


def a_mask_of_zeros() -> None:
    """On all ranks: statistics are those of the base class, and finite."""
    given, mask = tf.ones([2, 3, 4]), tf.zeros([2, 3], tf.bool)
    plain, synchronized = tf.keras.layers.BatchNormalization(), hvd.SyncBatchNormalization()
    for layer in (plain, synchronized):
        for call in (layer, tf.function(lambda *args, layer=layer, **kwargs: layer(*args, **kwargs))):
            assert np.isfinite(call(given, training=True, mask=mask)).all()
    for found, wanted in zip(synchronized.get_weights(), plain.get_weights()):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def a_mask_and_an_axis() -> None:
    """Ragged batches, whose channels are the last axis or another one."""
    random = np.random.default_rng(3)
    batches = [random.normal(size=(2 + rank, 3, 4)).astype("float32") * 3 + 5 for rank in range(SIZE)]
    masks = [random.random(size=(2 + rank, 3)) < 0.6 for rank in range(SIZE)]
    everything, every_mask = np.concatenate(batches), np.concatenate(masks)
    # Keras 3 has layers with one axis only.
    both = [[1, 2]] if tf.keras.__version__.startswith("2") else []
    for axis in (-1, 1, 2, *both):
        plain, synchronized = (
            kind(axis=axis) for kind in (tf.keras.layers.BatchNormalization, hvd.SyncBatchNormalization)
        )
        alone = plain(tf.constant(everything), training=True, mask=tf.constant(every_mask))
        found = synchronized(tf.constant(batches[RANK]), training=True, mask=tf.constant(masks[RANK]))
        first = sum(len(batch) for batch in batches[:RANK])
        np.testing.assert_allclose(found, alone[first : first + len(batches[RANK])], atol=1e-4)
        np.testing.assert_allclose(synchronized.moving_mean, plain.moving_mean, rtol=1e-5)
        np.testing.assert_allclose(synchronized.moving_variance, plain.moving_variance, rtol=1e-4)


def barriers_wait_for_the_collectives_before_them() -> None:
    for kind, call in (("RondeBarrier", hvd.barrier), ("RondeJoin", hvd.join)):

        @tf.function
        def step(given: Any, call: Any = call) -> Any:
            reduced = hvd.allreduce(given, op=hvd.Sum, name="before")
            call()
            return reduced

        graph = step.get_concrete_function(tf.ones(1)).graph
        (found,) = [each for each in graph.get_operations() if each.type == kind]
        assert "RondeAllreduce" in [each.type for each in found.control_inputs]
        assert step(tf.ones(1)).numpy() == [SIZE]


def operations_end_with_their_session() -> None:
    """One in flight, and one that waits for it because it has the same name. None of them reaches the next session."""
    begun, kinds = threading.Semaphore(0), []

    def mark() -> Any:
        begun.release()
        return np.int32(1)

    @tf.function
    def reduce(given: Any) -> Any:
        with tf.control_dependencies([tf.numpy_function(mark, [], tf.int32)]):
            return hvd.allreduce(given, op=hvd.Sum, name="ended")

    def run() -> None:
        try:
            reduce(tf.ones(1))
        except tf.errors.OpError as error:
            kinds.append(type(error).__name__)

    reduce.get_concrete_function(tf.ones(1))
    threads = [threading.Thread(target=run) for _ in range(2 if RANK == 0 else 0)]
    for each in threads:
        each.start()
    for _ in threads:
        assert begun.acquire(timeout=60)
    if threads:
        time.sleep(1)  # until the operations after the marks were submitted
    hvd.barrier()
    hvd.shutdown()
    for each in threads:
        each.join(60)
    assert kinds == ["AbortedError"] * len(threads), kinds
    hvd.init()
    for _ in range(2):
        assert reduce(tf.ones(1)).numpy() == [SIZE]


def gradients_in_a_session_with_other_ranks() -> None:
    """A function that was traced in one session takes this rank's rows in the next one, where it has another rank."""
    if SIZE < 3:
        return  # a set of all ranks would be a duplicate
    some = hvd.ProcessSet([0, 1])

    @tf.function(input_signature=[tf.TensorSpec([None])])
    def gradient(given: Any) -> Any:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(given)
            gathered = hvd.allgather(given, name="gathered", process_set=some)
            (grouped,) = hvd.grouped_allgather([given], name="grouped", process_set=some)
            weights = tf.constant([1.0, 10.0, 100.0])  # rank 0 has one row, and rank 1 has two
            losses = [tf.reduce_sum(each * weights) for each in (gathered, grouped)]
        return [tape.gradient(loss, given) for loss in losses]

    numbers, job_rank = [], RANK
    for other in (job_rank, {0: 1, 1: 0}.get(job_rank, job_rank)):
        hvd.shutdown()
        token = pathlib.Path(os.environ["RONDE_TOKEN_FILE"]).with_name(f"rank-{other}.token")
        hvd.init(process_sets=[some], rank=other, token_file=token)
        assert hvd.rank() == other
        numbers.append(some.process_set_id)
        if other < 2:
            for found in gradient(tf.ones(other + 1)):
                np.testing.assert_allclose(found, [[1.0], [10.0, 100.0]][other])
        hvd.barrier()
    assert numbers[0] == numbers[1], numbers
    if job_rank < 2:
        assert gradient.experimental_get_tracing_count() == 1
    hvd.shutdown()
    hvd.init()


class Model:
    """One weight, whose step waits before its gradient is reduced."""

    def __init__(self, late: bool) -> None:
        self.weight, self.late = tf.Variable(1.0), late

    @tf.function
    def step(self, given: Any) -> None:
        with hvd.DistributedGradientTape(tf.GradientTape(), op=hvd.Sum) as tape:
            loss = given * self.weight
        with tf.control_dependencies([tf.numpy_function(self.wait, [], tf.int32)]):
            self.weight.assign(tape.gradient(loss, self.weight))

    def wait(self) -> Any:
        time.sleep(0.3 * self.late)
        return np.int32(0)


def functions_within_a_step_run_in_another_order_on_each_rank() -> None:
    """Their gradients are reduced by names of their own, also those of one function of two objects."""
    models = [Model(late=index == RANK % 2) for index in range(2)]

    @tf.function
    def step() -> None:
        for factor, model in zip((1.0, 100.0), models):
            model.step(factor * (RANK + 1))

    for _ in range(3):
        step()
        total = SIZE * (SIZE + 1) / 2
        assert [model.weight.numpy() for model in models] == [total, 100 * total], [model.weight for model in models]


def operations_of_one_name_at_the_same_time_are_refused() -> None:
    """In two functions within one, with a name that both have: the second one, as there is no order of the two."""
    begun, kinds = threading.Semaphore(0), []
    # Functions without variables of their own would run one after the other.
    variables = [tf.Variable([sign]) for sign in (1.0, -1.0)]

    def mark() -> Any:
        begun.release()
        return np.int32(1)

    def reduced(variable: Any) -> Any:
        def reduce() -> Any:
            with tf.control_dependencies([tf.numpy_function(mark, [], tf.int32)]):
                return hvd.allreduce(variable.read_value(), op=hvd.Sum, name="same", ignore_name_scope=True)

        return tf.function(reduce)

    one, other = (reduced(variable) for variable in variables)
    step = tf.function(lambda: one() + other())

    def run() -> None:
        try:
            step()
        except tf.errors.InvalidArgumentError as error:
            kinds.append(str(error))

    if RANK == 0:
        thread = threading.Thread(target=run)
        thread.start()
        for _ in range(2):
            assert begun.acquire(timeout=60)
        time.sleep(1)  # until the operations after the marks were submitted
        hvd.barrier()
        thread.join(60)
        assert ["same is in flight for another operation" in each for each in kinds] == [True], kinds
    else:
        hvd.barrier()
        assert abs(hvd.allreduce(tf.ones(1), op=hvd.Sum, name="same").numpy()[0]) >= SIZE - 2


def operations_of_one_name_after_one_another() -> None:
    """The name of an operation is free when TensorFlow gets its result: the next operation of that name may begin."""

    def reduced(given: Any) -> Any:
        return hvd.allreduce(given, op=hvd.Sum, name="in_turn", ignore_name_scope=True)

    one, other = tf.function(reduced), tf.function(lambda given: 2.0 * reduced(given))
    step = tf.function(lambda given: other(one(given)))
    for _ in range(300):
        np.testing.assert_allclose(step(tf.ones(1)), [2 * SIZE**2])
        total = hvd.allreduce(tf.constant([RANK + 1.0]), op=hvd.Sum, name="m")
        greatest = hvd.allreduce(tf.constant([RANK + 1.0]), op=hvd.Max, name="m")
        assert (total.numpy(), greatest.numpy()) == (SIZE * (SIZE + 1) / 2, SIZE)


def an_invalid_argument_of_one_rank() -> None:
    """Its program ends, which the others get to know."""
    splits, kind = ([-1] * SIZE, "InvalidArgumentError") if RANK == 0 else ([1] * SIZE, "AbortedError")
    try:
        hvd.alltoall(tf.ones(SIZE), splits, name="one")
    except tf.errors.OpError as error:
        assert type(error).__name__ == kind, error
        assert RANK == 0 or "rank 0 has shut down" in str(error), error
    else:
        raise AssertionError("splits of -1 were accepted")


PARTS = [
    the_self_test_runs_when_a_graph_is_traced,
    loops_within_loops,
    gradients_of_groups_with_integers,
    an_empty_batch,
    a_mask_of_zeros,
    a_mask_and_an_axis,
    barriers_wait_for_the_collectives_before_them,
    operations_end_with_their_session,
    gradients_in_a_session_with_other_ranks,
    functions_within_a_step_run_in_another_order_on_each_rank,
    operations_of_one_name_at_the_same_time_are_refused,
    operations_of_one_name_after_one_another,
    an_invalid_argument_of_one_rank,
]
for part in PARTS:
    if not sys.argv[1:] or part.__name__ in sys.argv[1:]:
        part()
        print(f"rank {RANK}: {part.__name__}", flush=True)
print(f"rank {RANK}: the edges are right", flush=True)
