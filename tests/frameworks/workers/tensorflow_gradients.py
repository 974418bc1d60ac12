"""Gradients of the collectives of ronde.tensorflow, eagerly and in graphs, against what NumPy computes."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import ronde.tensorflow as hvd
import tensorflow as tf

tf.get_logger().setLevel("ERROR")  # of functions that are traced often

hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()


def weights(rank: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """By what a rank weighs the elements of a result in its loss."""
    return np.random.default_rng(rank).normal(size=shape)


def gradients_of(function: Callable[[Any], Any], tensor: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """The gradient of this rank's loss, eagerly and in a graph."""

    def gradient(given: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(given)
            result = function(given)
            loss = tf.reduce_sum(result * tf.constant(weights(RANK, tuple(result.shape))))
        return tape.gradient(loss, given)

    given = tf.constant(tensor)
    shape = function(given).shape

    def in_graph(given: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(given)
            loss = tf.reduce_sum(function(given) * tf.constant(weights(RANK, tuple(shape))))
        return tape.gradient(loss, given)

    return [gradient(given).numpy(), tf.function(in_graph)(given).numpy()]


def check(found: list[np.ndarray[Any, Any]], expected: np.ndarray[Any, Any]) -> None:
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=1e-12)


def everybodys(shape: tuple[int, ...]) -> list[np.ndarray[Any, Any]]:
    return [weights(rank, shape) for rank in range(SIZE)]


def main() -> None:
    mine = weights(100 + RANK, (4, 3))
    check(gradients_of(hvd.allreduce, mine), np.mean(everybodys((4, 3)), axis=0))
    scaled = gradients_of(lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5, name="named"), mine)
    check(scaled, np.sum(everybodys((4, 3)), axis=0) * 0.5)
    check(gradients_of(lambda t: hvd.grouped_allreduce([t, t * 2])[1], mine), 2 * np.mean(everybodys((4, 3)), axis=0))

    rows = [rank + 1 for rank in range(SIZE)]
    gathered = np.mean(everybodys((sum(rows), 3)), axis=0)
    own = gathered[sum(rows[:RANK]) : sum(rows[: RANK + 1])]
    ragged = weights(100 + RANK, (rows[RANK], 3))
    check(gradients_of(hvd.allgather, ragged), own)
    check(gradients_of(lambda t: hvd.grouped_allgather([t])[0], ragged), own)

    for root in (0, SIZE - 1):
        expected = np.mean(everybodys((4, 3)), axis=0) * (root == RANK)
        check(gradients_of(lambda t, root=root: hvd.broadcast(t, root), mine), expected)

    sends = [[(sender + receiver) % 3 for receiver in range(SIZE)] for sender in range(SIZE)]
    received = [weights(r, (sum(sends[sender][r] for sender in range(SIZE)), 2)) for r in range(SIZE)]
    parts = []
    for receiver in range(SIZE):
        first = sum(sends[sender][receiver] for sender in range(RANK))
        parts.append(received[receiver][first : first + sends[RANK][receiver]])
    given = weights(100 + RANK, (sum(sends[RANK]) + 1, 2))
    expected = np.concatenate([*parts, np.zeros((1, 2))])  # the last row is not sent
    check(gradients_of(lambda t: hvd.alltoall(t, sends[RANK])[0], given), expected)

    full = weights(100 + RANK, (5, 2))
    lengths = [len(part) for part in np.array_split(np.zeros(5), SIZE)]
    pieces = np.concatenate([weights(rank, (lengths[rank], 2)) for rank in range(SIZE)])
    check(gradients_of(lambda t: hvd.reducescatter(t, op=hvd.Average), full), pieces)
    check(gradients_of(lambda t: hvd.reducescatter(t, op=hvd.Sum, postscale_factor=2.0), full), pieces * 2 * SIZE)
    check(gradients_of(lambda t: hvd.grouped_reducescatter([t], op=hvd.Average)[0], full), pieces)
    second_derivative()
    print(f"rank {RANK}: all gradients are right", flush=True)


def second_derivative() -> None:
    point = tf.constant([2.0, 3.0], tf.float64)
    with tf.GradientTape() as outer:
        outer.watch(point)
        with tf.GradientTape() as inner:
            inner.watch(point)
            value = tf.reduce_sum(hvd.allreduce(point**3))
        first = inner.gradient(value, point)
    np.testing.assert_allclose(first, 3 * point**2)
    np.testing.assert_allclose(outer.gradient(first, point), 6 * point)


main()
