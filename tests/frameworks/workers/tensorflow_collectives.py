"""Collectives of ronde.tensorflow, eagerly and in graphs, against NumPy."""

from __future__ import annotations

import sys
from typing import Any, Callable

import numpy as np
import ronde.tensorflow as hvd
import tensorflow as tf

tf.get_logger().setLevel("ERROR")  # of functions that are traced often

TYPES = ["float32", "float64", "float16", "bfloat16", "int32", "int64", "uint8", "int8", "uint16", "int16"]
SHAPES = [(), (1,), (7,), (3, 4), (0, 5), (2, 3, 4)]


def value(rank: int, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """What a rank contributes: small whole numbers, whose products over three ranks are exact in all types."""
    count = int(np.prod(shape))
    return (np.arange(count).reshape(shape) % 3 + rank + 1).astype(tf.as_dtype(dtype).as_numpy_dtype)


def everybodys(shape: tuple[int, ...], dtype: str) -> list[np.ndarray[Any, Any]]:
    return [value(rank, shape, dtype) for rank in range(hvd.size())]


def check(found: Any, expected: Any) -> None:
    found = np.asarray(found.numpy() if hasattr(found, "numpy") else found)
    assert found.shape == np.shape(expected), (found.shape, np.shape(expected))
    np.testing.assert_array_equal(found.astype(np.float64), np.asarray(expected).astype(np.float64))


def both(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The result of a function eagerly, in a graph, and in a graph that does not know the shapes."""
    specs = [tf.TensorSpec(None, each.dtype) for each in arguments]
    return [
        function(*arguments),
        tf.function(function)(*arguments),
        tf.function(function, input_signature=specs)(*arguments),
    ]


def reductions() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in TYPES:
        for shape in SHAPES:
            mine, all_of_them = tf.constant(value(rank, shape, dtype)), everybodys(shape, dtype)
            stacked = np.stack([each.astype(np.float64) for each in all_of_them])
            for op, expected in [
                (hvd.Sum, stacked.sum(0)),
                (hvd.Min, stacked.min(0)),
                (hvd.Max, stacked.max(0)),
                (hvd.Product, stacked.prod(0)),
            ]:
                for found in both(lambda tensor, op=op: hvd.allreduce(tensor, op=op), mine):
                    check(found, expected)
    exact = tf.constant(value(rank, (5,), "float64"))
    mean = np.mean(everybodys((5,), "float64"), axis=0)
    for found in both(hvd.allreduce, exact):
        np.testing.assert_allclose(found, mean, rtol=1e-15)
    scaled = hvd.allreduce(exact, op=hvd.Sum, prescale_factor=1 / 3, postscale_factor=0.1)
    np.testing.assert_allclose(scaled, mean * size / 3 * 0.1, rtol=1e-14)  # as exact as float64, not float32
    assert hvd.allreduce(tf.constant([rank * 3 + 1]), average=False).numpy() == sum(r * 3 + 1 for r in range(size))


def groups() -> None:
    rank, size = hvd.rank(), hvd.size()
    tensors = [tf.constant(value(rank, shape, dtype)) for shape, dtype in [((3,), "float32"), ((2, 2), "int64")]]
    total = [
        sum(value(r, shape, dtype) for r in range(size)) for shape, dtype in [((3,), "float32"), ((2, 2), "int64")]
    ]
    for found in both(lambda *tensors: hvd.grouped_allreduce(list(tensors), op=hvd.Sum), *tensors):
        for each, expected in zip(found, total):
            check(each, expected)
    for found in both(lambda *tensors: hvd.grouped_allgather(list(tensors)), *tensors):
        check(found[0], np.concatenate(everybodys((3,), "float32")))
        check(found[1], np.concatenate(everybodys((2, 2), "int64")))
    for found in both(lambda *tensors: hvd.grouped_reducescatter(list(tensors), op=hvd.Sum), *tensors):
        for each, expected in zip(found, total):
            check(each, np.array_split(expected, size)[rank])
    assert hvd.grouped_allreduce([]) == []


def rows() -> None:
    rank, size = hvd.rank(), hvd.size()
    for dtype in [*TYPES, "bool"]:
        ragged = [value(r, (r, 3), dtype) for r in range(size)]  # rank 0 has none
        for found in both(hvd.allgather, tf.constant(ragged[rank])):
            check(found, np.concatenate(ragged))
        for found in both(lambda tensor: hvd.broadcast(tensor, size - 1), tf.constant(value(rank, (2, 3), dtype))):
            check(found, value(size - 1, (2, 3), dtype))
    for dtype in ["float32", "int32"]:
        full = [value(r, (5, 2), dtype) for r in range(size)]
        for found in both(lambda tensor: hvd.reducescatter(tensor, op=hvd.Sum), tf.constant(full[rank])):
            check(found, np.array_split(sum(full), size)[rank])
    exchange()


def exchange() -> None:
    rank, size = hvd.rank(), hvd.size()
    sends = [[(sender + receiver) % 3 for receiver in range(size)] for sender in range(size)]
    inputs = [value(sender, (sum(sends[sender]) + 1, 2), "float32") for sender in range(size)]  # a row stays
    parts = [np.split(inputs[sender], np.cumsum(sends[sender]))[rank] for sender in range(size)]
    arguments = [tf.constant(inputs[rank]), tf.constant(sends[rank], tf.int32)]
    for received, splits in both(hvd.alltoall, *arguments):
        check(received, np.concatenate(parts))
        check(splits, [sends[sender][rank] for sender in range(size)])
    equal = [value(sender, (2 * size, 3), "int64") for sender in range(size)]
    for found in both(hvd.alltoall, tf.constant(equal[rank])):
        check(found, np.concatenate([each[2 * rank : 2 * rank + 2] for each in equal]))


def adasum() -> None:
    """Of two ranks: orthogonal gradients are added, equal ones averaged."""
    if hvd.size() != 2:
        return
    orthogonal = tf.constant([1.0, 0.0] if hvd.rank() == 0 else [0.0, 2.0])
    for found in both(lambda tensor: hvd.allreduce(tensor, op=hvd.Adasum), orthogonal):
        check(found, [1.0, 2.0])
    check(hvd.allreduce(tf.constant([3.0, 4.0]), op=hvd.Adasum), [3.0, 4.0])


def slices() -> None:
    rank, size = hvd.rank(), hvd.size()
    mine = tf.IndexedSlices(tf.fill([rank + 1, 2], float(rank + 1)), tf.range(rank + 1), tf.constant([9, 2]))
    expected = np.zeros((9, 2))
    for r in range(size):
        expected[: r + 1] += r + 1
    check(tf.convert_to_tensor(hvd.allreduce(mine, op=hvd.Sum)), expected)
    np.testing.assert_allclose(tf.convert_to_tensor(hvd.allreduce(mine)), expected / size, rtol=1e-6)
    traced = tf.function(
        lambda values: tf.convert_to_tensor(hvd.allreduce(tf.IndexedSlices(values, mine.indices, mine.dense_shape)))
    )
    np.testing.assert_allclose(traced(mine.values), expected / size, rtol=1e-6)


def queries() -> None:
    def asked() -> Any:
        return hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(), hvd.process_set_included_op()

    expected = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), 1)
    assert tuple(int(each) for each in asked()) == expected
    assert tuple(int(each) for each in tf.function(asked)()) == expected


def sets() -> None:
    """Each rank in a set of its own and rank 0 in another one, too."""
    rank, size = hvd.rank(), hvd.size()
    if size == 1:
        return  # its only set is that of all ranks
    own = [hvd.add_process_set([r]) for r in range(size)]
    check(hvd.allreduce(tf.constant([rank]), op=hvd.Sum, process_set=own[rank]), [rank])
    pair = hvd.add_process_set([0, size - 1]) if size > 2 else hvd.global_process_set
    if pair.included():
        for found in both(lambda tensor: hvd.allgather(tensor, process_set=pair), tf.constant([rank])):
            check(found, [0, size - 1])
        tape_in_set(pair)
        if pair is not hvd.global_process_set:
            orthogonal = tf.constant([1.0, 0.0] if rank == 0 else [0.0, 2.0])
            check(hvd.allreduce(orthogonal, op=hvd.Adasum, process_set=pair), [1.0, 2.0])
            assert hvd.join(process_set=pair) in (0, size - 1)
    number = own[0].process_set_id or 0
    assert int(hvd.process_set_included_op(77)) == -3
    assert (int(hvd.size_op(number)), int(hvd.process_set_included_op(number))) == (1, int(rank == 0))
    try:
        hvd.allreduce(tf.constant([1.0]), process_set=own[(rank + 1) % size])
    except ValueError as error:
        assert "is not a member of the provided process set" in str(error)
    else:
        raise AssertionError("a rank that is not in the set took part")
    for each in own:
        assert hvd.remove_process_set(each)


def tape_in_set(members: Any) -> None:
    weight = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * float(hvd.rank()))
    found = hvd.DistributedGradientTape(tape, process_set=members).gradient(loss, [weight])[0]
    check(found, [sum(members.ranks) / len(members.ranks)] * 2)


def in_parallel() -> None:
    """All operations of a graph are in flight at once, also with one thread; ranks start them in opposite orders."""

    @tf.function
    def many(tensor: Any) -> Any:
        order = range(64) if hvd.rank() % 2 else range(63, -1, -1)
        found = {index: hvd.allreduce(tensor * float(index), op=hvd.Sum, name=f"many.{index}") for index in order}
        return [found[index] for index in range(64)]

    total = float(sum(range(1, hvd.size() + 1)))
    for _ in range(3):
        for index, each in enumerate(many(tf.fill([1000], float(hvd.rank() + 1)))):
            check(each, np.full(1000, index * total))


def in_loops() -> None:
    @tf.function
    def mapped(rows: Any) -> Any:
        return tf.map_fn(lambda row: hvd.allreduce(row, op=hvd.Sum, name="mapped"), rows)

    @tf.function
    def looped(tensor: Any) -> Any:
        for _ in tf.range(5):
            tensor = hvd.allreduce(tensor, op=hvd.Average) + 1.0
        return tensor

    mine = [value(rank, (6, 3), "float32") for rank in range(hvd.size())]
    check(mapped(tf.constant(mine[hvd.rank()])), sum(mine))
    np.testing.assert_allclose(looped(tf.constant(float(hvd.rank()))), np.mean(range(hvd.size())) + 5, rtol=1e-6)


def objects() -> None:
    rank, size = hvd.rank(), hvd.size()
    assert hvd.broadcast_object({"rank": rank}, size - 1) == {"rank": size - 1}
    assert hvd.broadcast_object_fn(0)([rank]) == [0]
    assert hvd.allgather_object("x" * rank) == ["x" * each for each in range(size)]


def joins() -> None:
    """Ranks that have joined contribute zeros."""
    for step in range(hvd.rank() + 1):
        found = hvd.allreduce(tf.constant([1.0]), op=hvd.Sum, name=f"uneven.{step}")
        check(found, [hvd.size() - step])
    assert hvd.join() in range(hvd.size())


if __name__ == "__main__":
    tf.config.threading.set_inter_op_parallelism_threads(1)
    hvd.init(process_sets="dynamic")
    for part in [reductions, groups, rows, adasum, slices, queries, sets, in_parallel, in_loops, objects, joins]:
        part()
        hvd.barrier()
    print(f"rank {hvd.rank()}: all collectives are right", flush=True)
    hvd.shutdown()
    hvd.init()
    check(hvd.allreduce(tf.constant([1.0]), op=hvd.Sum), [hvd.size()])
    sys.exit(0)
