"""Graphs of TensorFlow 1: optimizers, the hook, aggregation, Adasum, and the elastic state of variables."""

from __future__ import annotations

from typing import Any

import numpy as np
import ronde.tensorflow as hvd
import tensorflow as tf2

tf: Any = tf2.compat.v1
tf.disable_eager_execution()
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
RATE = 0.1


def losses(weight: Any, factor: float) -> Any:
    """A loss whose gradient is `factor`, in each element."""
    return tf.reduce_sum(weight * factor)


def trains() -> None:
    with tf.Graph().as_default():
        weight = tf.get_variable("weight", initializer=np.full(3, float(RANK)), use_resource=True)
        step = tf.train.get_or_create_global_step()
        optimizer = hvd.DistributedOptimizer(tf.train.MomentumOptimizer(RATE, 0.9), gradient_predivide_factor=2.0)
        train = optimizer.minimize(losses(weight, RANK + 1.0), global_step=step)
        hooks = [hvd.BroadcastGlobalVariablesHook(SIZE - 1)]
        config = tf.ConfigProto()
        config.gpu_options.visible_device_list = str(hvd.local_rank())
        with tf.train.MonitoredTrainingSession(hooks=hooks, config=config) as session:
            np.testing.assert_allclose(session.run(weight), SIZE - 1)
            session.run(train)
            np.testing.assert_allclose(session.run(weight), SIZE - 1 - RATE * (SIZE + 1) / 2)
            assert session.run(step) == 1
        assert optimizer.get_slot_names() == ["momentum"]
        assert optimizer.get_slot(weight, "momentum") is not None
        assert len(optimizer.variables()) == 1


def aggregates() -> None:
    """Gradients of two passes, then a step."""
    for average in (False, True):
        with tf.Graph().as_default():
            weight = tf.get_variable("weight", initializer=np.zeros(2), use_resource=True)
            factor = tf.placeholder(tf.float64, [])
            optimizer = hvd.DistributedOptimizer(
                tf.train.GradientDescentOptimizer(RATE),
                backward_passes_per_step=2,
                average_aggregated_gradients=average,
                op=hvd.Sum,
            )
            train = optimizer.minimize(tf.reduce_sum(weight * factor))
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                found = []
                for number in range(4):
                    session.run(train, {factor: RANK + number})
                    found.append(session.run(weight)[0])
            sums = [sum(rank + number for rank in range(SIZE)) / (2 if average else 1) for number in range(4)]
            first, second = -RATE * (sums[0] + sums[1]), -RATE * sum(sums)
            np.testing.assert_allclose(found, [0, first, first, second])


def sparse_and_groups() -> None:
    with tf.Graph().as_default():
        table = tf.get_variable("table", initializer=np.zeros((3, 2)), use_resource=True)
        other = tf.get_variable("other", initializer=np.zeros(2), use_resource=True)
        loss = tf.reduce_sum(tf.gather(table, [RANK % 3])) + tf.reduce_sum(other)
        optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(1.0), num_groups=1)
        train = optimizer.minimize(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            wanted = np.zeros((3, 2))
            for rank in range(SIZE):
                wanted[rank % 3] -= 1 / SIZE
            np.testing.assert_allclose(session.run(table), wanted)
            np.testing.assert_allclose(session.run(other), [-1, -1])
        local = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(1.0))
        local.register_local_var(other)
        (gradient, _), *_ = local.compute_gradients(tf.reduce_sum(other) * (RANK + 1.0), [other])
        with tf.Session() as session:
            np.testing.assert_allclose(session.run(gradient), [(RANK + 1) / SIZE] * 2)


def adasum() -> None:
    """Two ranks change orthogonal elements, so both changes count whole; equal ones are averaged."""
    if SIZE != 2:
        return
    orthogonal, equal = ([[1.0, 0.0], [0.0, 2.0]], [-1.0, -2.0]), ([[1.0, 2.0]] * 2, [-1.0, -2.0])
    for (factors, wanted), is_resource in [(orthogonal, True), (orthogonal, False), (equal, True)]:
        with tf.Graph().as_default():
            weight = tf.get_variable("weight", initializer=np.zeros(2), use_resource=is_resource)
            optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(1.0), op=hvd.Adasum)
            train = optimizer.minimize(tf.reduce_sum(weight * factors[RANK]))
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(train)
                np.testing.assert_allclose(session.run(weight), wanted)
    adasum_of_passes(*orthogonal)
    adasum_beside_local_variables()


def adasum_beside_local_variables() -> None:
    """What a rank changes of a local variable stays as it is."""
    with tf.Graph().as_default():
        shared, local = (tf.get_variable(name, initializer=np.zeros(1)) for name in ("shared", "local"))
        optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(1.0), op=hvd.Adasum)
        optimizer.register_local_var(local)
        train = optimizer.minimize(tf.reduce_sum(shared + local * (RANK + 1.0)))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(train)
            np.testing.assert_allclose(session.run([shared, local]), [[-1.0], [-1.0 - RANK]])


def adasum_of_passes(factors: Any, wanted: Any) -> None:
    """The first of two passes has no collective: it is done on one rank before the other begins."""
    with tf.Graph().as_default():
        weight = tf.get_variable("weight", initializer=np.zeros(2), use_resource=True)
        optimizer = hvd.DistributedOptimizer(
            tf.train.GradientDescentOptimizer(1.0), op=hvd.Adasum, backward_passes_per_step=2
        )
        train = optimizer.minimize(tf.reduce_sum(weight * factors[RANK]))
        nodes = [each for each in tf.get_default_graph().get_operations() if each.type == "RondeAllreduce"]
        assert all(each._get_control_flow_context() is not None for each in nodes)  # in a branch
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            if RANK == 0:
                session.run(train)
            hvd.client().barrier()
            if RANK == 1:
                session.run(train)
            np.testing.assert_allclose(session.run(weight), [0.0, 0.0])
            session.run(train)
            np.testing.assert_allclose(session.run(weight), [2 * each for each in wanted])


def state_of_variables() -> None:
    with tf.Graph().as_default(), tf.Session() as session:
        weight = tf.get_variable("weight", initializer=np.full(2, float(RANK)), use_resource=True)
        session.run(tf.global_variables_initializer())
        state = hvd.elastic.TensorFlowState(session=session, batch=RANK)
        state.sync()
        assert state.batch == 0
        np.testing.assert_allclose(session.run(weight), 0)
        session.run(weight.assign([5.0, 6.0]))
        state.batch = 7
        state.commit()
        session.run(weight.assign([0.0, 0.0]))
        state.batch = 9
        state.restore()
        assert (state.batch, session.run(weight).tolist()) == (7, [5.0, 6.0])
        nodes = len(session.graph.get_operations())
        state.sync()
        assert len(session.graph.get_operations()) == nodes
        synchronizes_with_a_new_worker(state)


def synchronizes_with_a_new_worker(state: Any) -> None:
    """The last rank's graph is new, and its names are those of the others."""
    with tf.Graph().as_default(), tf.Session() as session:
        weight = tf.get_variable("weight", initializer=np.zeros(2), use_resource=True)
        session.run(tf.global_variables_initializer())
        mine = hvd.elastic.TensorFlowState(session=session, batch=0) if RANK == SIZE - 1 and SIZE > 1 else state
        mine.sync()
        assert mine.batch == 7
        assert mine is state or session.run(weight).tolist() == [5.0, 6.0]


def everything_else() -> None:
    with tf.Graph().as_default(), tf.Session() as session:
        gathered = hvd.allgather(tf.fill([RANK + 1], RANK))
        assert session.run(gathered).tolist() == [rank for rank in range(SIZE) for _ in range(rank + 1)]
        session.run(hvd.barrier())
        assert session.run(hvd.join()) in range(SIZE)
        assert hvd.broadcast_object([RANK], session=session) == [0]
    for wrong, words in [
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "predivide"),
        ({"op": hvd.Adasum, "average_aggregated_gradients": True}, "Adasum"),
        ({"op": hvd.Adasum, "num_groups": 1}, "Adasum"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step"),
        ({"groups": [1]}, "groups"),
        ({"num_groups": -1}, "num_groups"),
        ({"num_groups": 1, "groups": [[]]}, "not both"),
        ({"op": hvd.Max}, "Average, Sum or Adasum"),
    ]:
        try:
            hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(1.0), **wrong)
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{wrong} was accepted")


PARTS = (trains, aggregates, sparse_and_groups, adasum, state_of_variables, everything_else)
for part in PARTS:
    part()
print(f"rank {RANK}: TensorFlow 1 trains", flush=True)
