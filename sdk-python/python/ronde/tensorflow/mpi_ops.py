"""Collectives on TensorFlow's tensors, with Horovod's names, arguments and rules.

Common to all of them:

tensor      -- anything that `tf.convert_to_tensor` takes, of a type that ronde supports, the same on all ranks
tensors     -- for grouped calls: a list of such tensors, in the same order on all ranks
name        -- identifies the operation on all ranks. Eager operations without one are matched in call order; in a graph
               they are named after their tensor
process_set -- the ranks that take part; default: all. A root is always a rank of the job.
ignore_name_scope -- whether the name of an operation in a graph lacks `tf.name_scope`

They work eagerly, in `tf.function` and in graphs of TensorFlow 1, and have gradients (docs/TENSORFLOW.md). Operations
of one graph run in parallel and in any order.

In a function with jit_compile=True there are `allreduce` and `grouped_allreduce` of tensors only, on CPUs; all others
raise NotImplementedError when the function is traced.

They raise ValueError for invalid arguments, for a process set that is not registered or does not contain this process,
and before `init`. An argument that is invalid by itself, such as negative splits, raises InvalidArgumentError on the
rank that gives it; the others wait for that rank until its program ends, or until the deadline.

If the operation fails, running it raises an error of `tf.errors` with the same text on all ranks: InvalidArgumentError
when ranks disagree, AbortedError when a rank was lost or shut down, DeadlineExceededError after a timeout,
FailedPreconditionError after `shutdown`, ResourceExhaustedError when shared memory is full.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ronde.frameworks import world
from ronde.frameworks.process_sets import ProcessSet, global_process_set, members_of, root_of
from ronde.ops import Adasum, Average, Max, Min, Product, Sum
from ronde.tensorflow import xla
from ronde.tensorflow.compression import Compression, Compressor
from ronde.tensorflow.names import name_of
from ronde.tensorflow.native import UNORDERED, ops, self_test

if TYPE_CHECKING:
    from collections.abc import Sequence

_OPS = (Average, Sum, Adasum, Min, Max, Product)


def set_number(process_set: ProcessSet) -> int:
    """Returns the number of a process set. Raises ValueError for one that cannot be used, and before `init`."""
    self_test()
    members = members_of(process_set)
    return 0 if members is None or members.id is None else members.id


def reduce_op(average: bool | None, op: int | None) -> int:
    """Returns the reduction. Raises ValueError for both arguments, and for a reduction that TensorFlow has not."""
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average; give only op.")
        warnings.warn("average is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    op = Average if op is None else op
    if op not in _OPS:
        raise ValueError(f"op is {op!r}; give Average, Sum, Adasum, Min, Max or Product")
    return op


def device(name: str) -> contextlib.AbstractContextManager[Any]:
    """Returns the context of a device; one that does nothing for an empty name."""
    return tf.device(name) if name else contextlib.nullcontext()


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduces all ranks' tensors, of the same shape; of `tf.IndexedSlices` it gathers the rows of all ranks.

    average     -- deprecated: use op=Average or op=Sum; together with `op` it raises ValueError
    device_dense, device_sparse -- the device for the operation on a tensor, and on slices
    compression -- compresses the tensor before and decompresses the result after
    op          -- Average (default), Sum, Adasum, Min, Max or Product
    prescale_factor, postscale_factor -- multiply each tensor before the reduction, and its result

    Differentiable: its gradient is reduced the same way. The average of integers is truncated toward zero. Raises
    NotImplementedError for slices with another `op` than Average and Sum, and with scales.
    """
    op = reduce_op(average, op)
    if isinstance(tensor, tf.IndexedSlices):
        if op not in (Average, Sum):
            raise NotImplementedError(
                "the reduction of tf.IndexedSlices has op=Average and op=Sum; convert it to a tensor"
            )
        if prescale_factor != 1.0 or postscale_factor != 1.0:
            raise NotImplementedError("tf.IndexedSlices are reduced without prescale_factor and postscale_factor")
        with device(device_sparse):
            return _gathered_slices(tensor, op, name, process_set, ignore_name_scope)
    with device(device_dense):
        compressed, context = compression.compress(_tensor(tensor))
        options = _scales(op, prescale_factor, postscale_factor, process_set)
        found = name_of("allreduce", compressed, name, ignore_name_scope)
        if xla.is_traced():
            reduced = xla.allreduce([compressed], found, **options)[0]
        else:
            reduced = ops.ronde_allreduce(compressed, tensor_name=found, **options)
        return compression.decompress(reduced, context)


def _tensor(tensor: Any) -> Any:
    return tf.convert_to_tensor(tensor)


def _scales(op: int, prescale: float, postscale: float, process_set: ProcessSet) -> dict[str, Any]:
    """Returns the attributes of a reduction. Numbers travel as text, in which they are exact."""
    return {
        "reduce_op": op,
        "prescale_factor": repr(float(prescale)),
        "postscale_factor": repr(float(postscale)),
        "process_set_id": set_number(process_set),
    }


def _gathered_slices(slices: Any, op: int, name: str | None, process_set: ProcessSet, ignore_name_scope: bool) -> Any:
    xla.refuse("the reduction of tf.IndexedSlices without sparse_as_dense=True")
    base = name_of("allreduce", slices.values, name, ignore_name_scope)
    number = set_number(process_set)
    values = ops.ronde_allgather(slices.values, tensor_name=base and f"{base}.values", process_set_id=number)
    indices = ops.ronde_allgather(slices.indices, tensor_name=base and f"{base}.indices", process_set_id=number)
    if op == Average:
        values = _divided(values, ops.ronde_size(process_set_id=number))
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def _divided(values: Any, size: Any) -> Any:
    if values.dtype.is_integer:
        return tf.cast(tf.truncatediv(values, tf.cast(size, values.dtype)), values.dtype)
    return values / tf.cast(size, values.dtype)


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """`allreduce` of several tensors as a group, which starts when all are ready on all ranks. Differentiable.

    Slices among the tensors are gathered by themselves.
    """
    op = reduce_op(average, op)
    results: list[Any] = list(tensors)
    for index, each in enumerate(results):
        if isinstance(each, tf.IndexedSlices):
            results[index] = allreduce(
                each,
                device_sparse=device_sparse,
                op=op,
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
                name=name and f"{name}.{index}",
                process_set=process_set,
                ignore_name_scope=ignore_name_scope,
            )
    dense = [index for index, each in enumerate(tensors) if not isinstance(each, tf.IndexedSlices)]
    if not dense:
        return results
    with device(device_dense):
        pairs = [compression.compress(_tensor(tensors[index])) for index in dense]
        options = _scales(op, prescale_factor, postscale_factor, process_set)
        found = name_of("grouped_allreduce", pairs[0][0], name, ignore_name_scope)
        compressed = [each for each, _ in pairs]
        reduce = xla.allreduce if xla.is_traced() else ops.ronde_grouped_allreduce
        reduced = reduce(compressed, tensor_name=found, **options)
        for index, each, (_, context) in zip(dense, reduced, pairs):
            results[index] = compression.decompress(each, context)
    return results


def allreduce_many(tensors: Sequence[Any], op: int, scales: tuple[float, float], process_set: ProcessSet) -> list[Any]:
    """Reduces tensors eagerly, all at once and each by itself. Other eager operations run one after another."""
    if not tensors:
        return []
    return list(ops.ronde_allreduce_many(list(tensors), tensor_name="", **_scales(op, *scales, process_set)))


def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenates all ranks' tensors along the first dimension, in which they may differ. Differentiable.

    The result is of shape (sum of all ranks' rows, *rest). Raises an error for a scalar.
    """
    xla.refuse("allgather")
    tensor = _tensor(tensor)
    number = set_number(process_set)
    found = name_of("allgather", tensor, name, ignore_name_scope)
    return ops.ronde_allgather(tensor, tensor_name=found, process_set_id=number)


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """`allgather` of several tensors as a group, which starts when all are ready on all ranks. Differentiable."""
    xla.refuse("grouped_allgather")
    tensors = [_tensor(each) for each in tensors]
    if not tensors:
        return []
    number = set_number(process_set)
    found = name_of("grouped_allgather", tensors[0], name, ignore_name_scope)
    return list(ops.ronde_grouped_allgather(tensors, tensor_name=found, process_set_id=number))


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Broadcasts the tensor of rank `root_rank`, of the same shape on all ranks. Differentiable.

    Raises ValueError for a root that is not in the process set.
    """
    xla.refuse("broadcast")
    tensor = _tensor(tensor)
    number, root = set_number(process_set), root_of(root_rank, process_set)
    found = name_of("broadcast", tensor, name, ignore_name_scope)
    return ops.ronde_broadcast(tensor, root_rank=root, tensor_name=found, process_set_id=number)


def broadcast_many(tensors: Sequence[Any], root_rank: int, name: str, process_set: ProcessSet) -> list[Any]:
    """Broadcasts several tensors at once, each by itself."""
    xla.refuse("broadcast")
    if not tensors:
        return []
    number, root = set_number(process_set), root_of(root_rank, process_set)
    found = name if tf.executing_eagerly() else name_of("broadcast", None, name)
    return list(ops.ronde_broadcast_many(list(tensors), root_rank=root, tensor_name=found, process_set_id=number))


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows to every rank and returns the rows received from all ranks, in rank order. Differentiable.

    splits -- how many rows each rank gets, in rank order, starting at the first row: int32 in one dimension; may be 0.
              Without it every rank gets the same number, by which the rows must be divisible

    Returns the tensor, or (tensor, received_splits) if splits were given: how many rows came from each rank, as int32.
    """
    xla.refuse("alltoall")
    tensor = _tensor(tensor)
    number = set_number(process_set)
    given = tf.zeros([0], tf.int32) if splits is None else tf.convert_to_tensor(splits, dtype=tf.int32)
    found = name_of("alltoall", tensor, name, ignore_name_scope)
    received, received_splits = ops.ronde_alltoall(tensor, given, tensor_name=found, process_set_id=number)
    return received if splits is None else (received, received_splits)


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduces all ranks' tensors and returns this rank's rows of the result. Differentiable for Average and Sum.

    Of r rows over n ranks the first r % n ranks get one more than r // n. Raises an error for a scalar.
    """
    xla.refuse("reducescatter")
    _check_scatter(op)
    with device(device_dense):
        compressed, context = compression.compress(_tensor(tensor))
        options = _scales(op, prescale_factor, postscale_factor, process_set)
        found = name_of("reducescatter", compressed, name, ignore_name_scope)
        reduced = ops.ronde_reducescatter(compressed, tensor_name=found, **options)
        return compression.decompress(reduced, context)


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """`reducescatter` of several tensors as a group, which starts when all are ready on all ranks. Differentiable."""
    xla.refuse("grouped_reducescatter")
    _check_scatter(op)
    if not tensors:
        return []
    with device(device_dense):
        pairs = [compression.compress(_tensor(each)) for each in tensors]
        options = _scales(op, prescale_factor, postscale_factor, process_set)
        found = name_of("grouped_reducescatter", pairs[0][0], name)
        reduced = ops.ronde_grouped_reducescatter([each for each, _ in pairs], tensor_name=found, **options)
        return [compression.decompress(each, context) for each, (_, context) in zip(reduced, pairs)]


def _check_scatter(op: int) -> None:
    if op not in (Average, Sum, Min, Max, Product):
        raise ValueError(f"reducescatter has op=Average, Sum, Min, Max and Product, not {op!r}")


def barrier(process_set: ProcessSet = global_process_set, name: str | None = None) -> Any:
    """Waits until all ranks of the process set have called it; in a graph, returns the operation that waits.

    In a `tf.function` it begins when the collectives before it have ended. Collectives after it do not wait for it.
    """
    xla.refuse("barrier")
    number = set_number(process_set)
    with _after_collectives():
        return ops.ronde_barrier(tensor_name=name_of("barrier", None, name), process_set_id=number)


def _after_collectives() -> contextlib.AbstractContextManager[Any]:
    """Makes an operation of a `tf.function` wait for the collectives before it, which have no order otherwise."""
    if not tf.inside_function():
        return contextlib.nullcontext()
    graph = tf.compat.v1.get_default_graph()
    earlier = [each for each in graph.get_operations() if each.type in UNORDERED]
    context: contextlib.AbstractContextManager[Any] = tf.control_dependencies(earlier)
    return context


def join(process_set: ProcessSet = global_process_set) -> Any:
    """Announces that this rank has no more tensors, and waits until all ranks have. Returns the rank that joined last.

    process_set -- the set whose ranks these are; the result is a rank of all that `init` was given

    Until then, other ranks reduce with zeros of this rank. Returns an integer eagerly, a tensor in a graph. In a
    `tf.function` it begins when the collectives before it have ended; call none after it there.
    """
    xla.refuse("join")
    number = set_number(process_set)
    current = world.current()
    with _after_collectives():
        last = ops.ronde_join(process_set_id=number)
    if tf.executing_eagerly():
        return current.job_ranks.index(int(last))
    # A graph of all ranks is used again when a job has grown.
    return last if current.base is None else tf.argmax(tf.equal(current.job_ranks, last), output_type=tf.int32)


def rank_op(name: str | None = None) -> Any:
    """Returns this process's rank as a tensor, evaluated whenever the graph runs."""
    xla.refuse("rank_op")
    return ops.ronde_rank(name=name)


def local_rank_op(name: str | None = None) -> Any:
    """Returns this process's local rank as a tensor, evaluated whenever the graph runs."""
    xla.refuse("local_rank_op")
    return ops.ronde_local_rank(name=name)


def local_size_op(name: str | None = None) -> Any:
    """Returns the number of processes of this process's sidecar as a tensor, evaluated whenever the graph runs."""
    xla.refuse("local_size_op")
    return ops.ronde_local_size(name=name)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Returns the number of a process set's ranks as a tensor, evaluated whenever the graph runs."""
    xla.refuse("size_op")
    return ops.ronde_size(process_set_id=process_set_id, name=name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Returns 1 as a tensor if this process is in a process set, else 0, evaluated whenever the graph runs.

    It is -1 before `init` and after `shutdown`, and -3 for a set that does not exist.
    """
    xla.refuse("process_set_included_op")
    return ops.ronde_process_set_included(process_set_id=process_set_id, name=name)
