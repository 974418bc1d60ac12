"""The gradients of the operations, as Horovod defines them.

An all-reduce's gradient is reduced the same way. That of an all-gather is averaged, and each rank takes its own rows;
that of a broadcast is averaged, and the root takes it; that of an all-to-all travels back; that of a reduce-scatter is
gathered, times the scales, and times the number of ranks after a sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ronde.frameworks import world
from ronde.ops import Average, Sum
from ronde.tensorflow.names import gradient_name
from ronde.tensorflow.native import ops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def _options(operation: Any) -> dict[str, Any]:
    """The attributes of a reduction."""
    names = ("reduce_op", "prescale_factor", "postscale_factor", "process_set_id")
    return {name: operation.get_attr(name) for name in names}


@tf.RegisterGradient("RondeAllreduce")
def _allreduce(operation: Any, gradient: Any) -> Any:
    return ops.ronde_allreduce(gradient, tensor_name=gradient_name(operation), **_options(operation))


def _of_present(gradients: Sequence[Any], function: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """Returns what a function of gradients returns, with None where there is none, such as for an integer."""
    present = [each for each in gradients if each is not None]
    found = iter(function(present) if present else [])
    return [None if each is None else next(found) for each in gradients]


@tf.RegisterGradient("RondeAllreduceMany")
def _allreduce_many(operation: Any, *gradients: Any) -> Any:
    name, options = gradient_name(operation), _options(operation)
    return _of_present(gradients, lambda present: ops.ronde_allreduce_many(present, tensor_name=name, **options))


@tf.RegisterGradient("RondeGroupedAllreduce")
def _grouped_allreduce(operation: Any, *gradients: Any) -> Any:
    name, options = gradient_name(operation), _options(operation)
    return _of_present(gradients, lambda present: ops.ronde_grouped_allreduce(present, tensor_name=name, **options))


def _own_rows(operation: Any, reduced: Any, tensor: Any, part: str) -> Any:
    """Returns this rank's rows of a gathered gradient: those after the rows of lower ranks.

    Ranks are those when the graph runs. It may have been traced in an earlier session, where this process had another
    rank, or where a process set of this number had other ranks.
    """
    number = operation.get_attr("process_set_id")
    mine, rank = tf.shape(tensor, out_type=tf.int64)[0], tf.cast(ops.ronde_rank(), tf.int64)
    name = gradient_name(operation, part)
    pairs = ops.ronde_allgather(tf.stack([[rank, mine]]), tensor_name=name, process_set_id=number)
    first = tf.reduce_sum(tf.where(pairs[:, 0] < rank, pairs[:, 1], 0))
    return reduced[first : first + mine]


@tf.RegisterGradient("RondeAllgather")
def _allgather(operation: Any, gradient: Any) -> Any:
    number = operation.get_attr("process_set_id")
    name = gradient_name(operation)
    reduced = ops.ronde_allreduce(gradient, reduce_op=Average, tensor_name=name, process_set_id=number)
    return _own_rows(operation, reduced, operation.inputs[0], "gradient.rows")


@tf.RegisterGradient("RondeGroupedAllgather")
def _grouped_allgather(operation: Any, *gradients: Any) -> Any:
    options = {"tensor_name": gradient_name(operation), "process_set_id": operation.get_attr("process_set_id")}
    reduced = _of_present(gradients, lambda present: ops.ronde_grouped_allreduce(present, reduce_op=Average, **options))
    return [
        None if each is None else _own_rows(operation, each, tensor, f"gradient.rows.{index}")
        for index, (each, tensor) in enumerate(zip(reduced, operation.inputs))
    ]


@tf.RegisterGradient("RondeBroadcast")
def _broadcast(operation: Any, gradient: Any) -> Any:
    return _at_root(operation, gradient, gradient_name(operation))


@tf.RegisterGradient("RondeBroadcastMany")
def _broadcast_many(operation: Any, *gradients: Any) -> Any:
    return [None if each is None else _at_root(operation, each, gradient_name(operation)) for each in gradients]


def _at_root(operation: Any, gradient: Any, name: str) -> Any:
    number = operation.get_attr("process_set_id")
    reduced = ops.ronde_allreduce(gradient, reduce_op=Average, tensor_name=name, process_set_id=number)
    is_root = tf.equal(_job_rank(), operation.get_attr("root_rank"))
    return tf.where(is_root, reduced, tf.zeros_like(reduced))


def _job_rank() -> Any:
    """The rank in the job, of which roots are ranks."""
    current = world.current()
    # The rank when the graph runs, which may be another one than when it was traced.
    return ops.ronde_rank() if current.base is None else tf.gather(tf.constant(current.job_ranks), ops.ronde_rank())


@tf.RegisterGradient("RondeAlltoall")
def _alltoall(operation: Any, gradient: Any, _: Any) -> Any:
    received, number = operation.outputs[1], operation.get_attr("process_set_id")
    name = gradient_name(operation)
    returned, _ = ops.ronde_alltoall(gradient, received, tensor_name=name, process_set_id=number)
    # Rows after those of the splits were not sent.
    rest = tf.shape(operation.inputs[0])[0] - tf.shape(returned)[0]
    padding = tf.concat([[[0, rest]], tf.zeros([tf.rank(returned) - 1, 2], tf.int32)], 0)
    return tf.pad(returned, padding), None


@tf.RegisterGradient("RondeReducescatter")
def _reducescatter(operation: Any, gradient: Any) -> Any:
    number = operation.get_attr("process_set_id")
    return ops.ronde_allgather(
        _scaled(operation, gradient), tensor_name=gradient_name(operation), process_set_id=number
    )


@tf.RegisterGradient("RondeGroupedReducescatter")
def _grouped_reducescatter(operation: Any, *gradients: Any) -> Any:
    options = {"tensor_name": gradient_name(operation), "process_set_id": operation.get_attr("process_set_id")}
    scaled = [None if each is None else _scaled(operation, each) for each in gradients]
    return _of_present(scaled, lambda present: ops.ronde_grouped_allgather(present, **options))


def _scaled(operation: Any, gradient: Any) -> Any:
    op, number = operation.get_attr("reduce_op"), operation.get_attr("process_set_id")
    if op not in (Average, Sum):
        raise ValueError("reducescatter has a gradient with op=Average and op=Sum only")
    scale = float(operation.get_attr("prescale_factor")) * float(operation.get_attr("postscale_factor"))
    factor = tf.cast(scale, gradient.dtype)
    if op == Sum:
        factor *= tf.cast(ops.ronde_size(process_set_id=number), gradient.dtype)
    return gradient * factor


for _query in ("Barrier", "Join", "Rank", "Size", "LocalRank", "LocalSize", "ProcessSetIncluded"):
    tf.no_gradient(f"Ronde{_query}")
