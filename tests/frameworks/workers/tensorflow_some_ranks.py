"""`hvd.init(comm=[...])` of some ranks: what asks for the number of ranks counts these. Three ranks: two and one."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import ronde.tensorflow as hvd
import tensorflow as tf

tf.get_logger().setLevel("ERROR")
JOB_RANK = int(os.environ["RONDE_RANK"])
RANKS = [0, 1] if JOB_RANK < 2 else [2]
hvd.init(comm=RANKS)
RANK, SIZE = hvd.rank(), hvd.size()


def eagerly_and_in_a_graph(call: Any) -> list[Any]:
    return [call(), tf.function(call)()]


def averages_of_slices() -> None:
    def average() -> Any:
        given = tf.IndexedSlices(tf.ones([1, 2]) * (RANK + 1), tf.constant([RANK]), tf.constant([SIZE, 2]))
        return tf.convert_to_tensor(hvd.allreduce(given, name="slices"))

    for found in eagerly_and_in_a_graph(average):
        np.testing.assert_allclose(found, [[(rank + 1) / SIZE] * 2 for rank in range(SIZE)])


def gradients_of_scattered_rows() -> None:
    def gradient() -> Any:
        given = tf.ones([SIZE, 2])
        with tf.GradientTape() as tape:
            tape.watch(given)
            loss = tf.reduce_sum(hvd.reducescatter(given, op=hvd.Sum, name="scattered")) * (RANK + 1.0)
        return tape.gradient(loss, given)

    for found in eagerly_and_in_a_graph(gradient):
        np.testing.assert_allclose(found, [[SIZE * (rank + 1.0)] * 2 for rank in range(SIZE)])


def gradients_of_local_variables() -> None:
    local = tf.Variable(1.0)

    def gradient() -> Any:
        tape = hvd.DistributedGradientTape(tf.GradientTape())
        tape.register_local_source(local)
        with tape:
            loss = local * (RANK + 1.0)
        return tape.gradient(loss, local)

    for found in eagerly_and_in_a_graph(gradient):
        np.testing.assert_allclose(found, (RANK + 1) / SIZE)


def the_last_rank_to_join() -> None:
    assert tf.function(hvd.join)().numpy() in range(SIZE)


for part in (averages_of_slices, gradients_of_scattered_rows, gradients_of_local_variables, the_last_rank_to_join):
    part()
print(f"rank {JOB_RANK}: some ranks are a world")
hvd.shutdown()
