"""Collectives on MXNet's arrays, with Horovod's names, arguments and rules.

Common to all of them:

tensor      -- a dense `mxnet.nd.NDArray` or `mxnet.np.ndarray`, on any device, of a type that `ronde.Client.allreduce`
               accepts; the result is of the same class, on the same device
tensors     -- for grouped calls: a list of such arrays, in the same order on all ranks
name        -- identifies the operation on all ranks; operations without one are matched in call order
priority    -- unused: the sidecars order operations
process_set -- the ranks that take part; default: all. A root is always a rank of the job.

Calls wait for MXNet to compute the array, and return when the result is there. A function with a trailing `_` writes it
into its array. None of them is differentiable, as in Horovod.

All raise HorovodInternalError if the operation fails; `ronde.errors` defines its subclasses. They raise ValueError,
before anything is submitted, for invalid arguments, for a name that is already in flight, for a process set that is not
registered or does not contain this process, and before `init`; and TypeError for anything but a dense array of MXNet.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import mxnet as mx
import numpy

from ronde.client import Client
from ronde.frameworks import world
from ronde.frameworks.basics import client
from ronde.frameworks.process_sets import ProcessSet, global_process_set, members_of, root_of, size_of
from ronde.ops import Average, Sum

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "reducescatter",
]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Any:
    """Reduces all ranks' arrays, of the same shape; returns the result.

    average -- whether to average instead of adding; `op` supersedes it, and both raise ValueError
    op      -- any reduction of `ronde.Client.allreduce`; default: Average
    prescale_factor, postscale_factor -- multiply each array before the reduction, and its result
    """
    del priority
    options = _reduction(_reduce_op(average, op), prescale_factor, postscale_factor)
    return _performed(_ALLREDUCE, [tensor], name, process_set, **options)[0]


def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> Any:
    """`allreduce` into `tensor`, which it returns. After an error its contents are unspecified."""
    del priority
    options = _reduction(_reduce_op(average, op), prescale_factor, postscale_factor)
    return _performed(_ALLREDUCE, [tensor], name, process_set, is_in_place=True, **options)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[Any]:
    """`allreduce` of several arrays as a group, which starts when all are ready on all ranks."""
    del priority
    options = _reduction(_reduce_op(average, op), prescale_factor, postscale_factor)
    return _performed(_ALLREDUCE, tensors, name, process_set, **options)


def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: int | None = None,
) -> list[Any]:
    """`grouped_allreduce` into the arrays, which it returns."""
    del priority
    options = _reduction(_reduce_op(average, op), prescale_factor, postscale_factor)
    return _performed(_ALLREDUCE, tensors, name, process_set, is_in_place=True, **options)


def allgather(
    tensor: Any, name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenates all ranks' arrays along the first dimension, in which they may differ.

    The result is of shape (sum of all ranks' rows, *rest). Scalars raise ValueError.
    """
    del priority
    return _performed(_ALLGATHER, [tensor], name, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any], name: str | None = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """`allgather` of several arrays as a group, which starts when all are ready on all ranks."""
    del priority
    return _performed(_ALLGATHER, tensors, name, process_set)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns the array of rank `root_rank`, of the same shape on all ranks."""
    del priority
    root = root_of(root_rank, process_set)
    return _performed(_BROADCAST, [tensor], name, process_set, root_rank=root)[0]


def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """`broadcast` into `tensor`, which it returns."""
    del priority
    root = root_of(root_rank, process_set)
    return _performed(_BROADCAST, [tensor], name, process_set, is_in_place=True, root_rank=root)[0]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows to every rank and returns the rows received from all ranks, in rank order.

    splits -- how many rows each rank gets, in rank order, starting at the first row: an int32 array of MXNet or any
              iterable of integers; rows beyond their sum stay here. Without it every rank gets the same number, by
              which the rows must be divisible.

    Returns the array, or (array, received_splits) if splits were given, with int32 in an array of MXNet.
    """
    del priority
    members, array = members_of(process_set), to_numpy(tensor)
    numbers = None
    if splits is not None:
        numbers = _numbers(splits, len(array) if array.ndim else 0, size_of(process_set))
        array = array[: sum(numbers)]
    with world.traced("alltoall", name):
        result = client().alltoall(array, numbers, name, process_set=members)
    if numbers is None:
        return like(tensor, result)
    received, counts = result
    return like(tensor, received), like(tensor, numpy.asarray(counts, dtype="int32"), "int32")


def reducescatter(
    tensor: Any,
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduces all ranks' arrays and returns this rank's rows of the result.

    Of r rows over n ranks the first r % n ranks get one more than r // n. `op` is Average, Sum, Min, Max or Product.
    Raises ValueError for a scalar.
    """
    del priority
    options = _reduction(op, prescale_factor, postscale_factor)
    return _performed(_REDUCESCATTER, [tensor], name, process_set, **options)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: int = Average,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """`reducescatter` of several arrays as a group, which starts when all are ready on all ranks."""
    del priority
    options = _reduction(op, prescale_factor, postscale_factor)
    return _performed(_REDUCESCATTER, tensors, name, process_set, **options)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it."""
    members = members_of(process_set)
    with world.traced("barrier", None):
        client().barrier(process_set=members)


class _Collective(NamedTuple):
    """A collective of the client, and its form for several arrays."""

    name: str
    one: Callable[..., Any]
    group: Callable[..., list[Any]]


_ALLREDUCE = _Collective("allreduce", Client.allreduce, Client.grouped_allreduce)
_ALLGATHER = _Collective("allgather", Client.allgather, Client.grouped_allgather)
_BROADCAST = _Collective("broadcast", Client.broadcast, Client.grouped_broadcast)
_REDUCESCATTER = _Collective("reducescatter", Client.reduce_scatter, Client.grouped_reduce_scatter)


def _performed(
    collective: _Collective,
    tensors: Sequence[Any],
    name: str | None,
    process_set: ProcessSet,
    is_in_place: bool = False,
    **options: Any,
) -> list[Any]:
    """Performs a collective on arrays, several of them as a group. Returns the results.

    is_in_place -- whether the results are written into the arrays, which are returned
    options     -- further arguments of the client's method
    """
    given, members = list(tensors), members_of(process_set)
    arrays = [to_numpy(each) for each in given]
    if not arrays:
        return []
    options.update(name=name, process_set=members)
    with world.traced(collective.name, name):
        if len(arrays) == 1:
            results = [collective.one(client(), arrays[0], **options)]
        else:
            results = collective.group(client(), arrays, **options)
    if not is_in_place:
        return [like(each, result) for each, result in zip(given, results)]
    for each, result in zip(given, results):
        write(each, result)
    return given


def _reduction(op: int, prescale_factor: float, postscale_factor: float) -> dict[str, Any]:
    return {"op": op, "prescale_factor": prescale_factor, "postscale_factor": postscale_factor}


def to_numpy(tensor: Any) -> Any:
    """Returns a copy of an array in main memory. Raises TypeError for anything but a dense array of MXNet."""
    if not isinstance(tensor, mx.nd.NDArray):
        raise TypeError(f"{type(tensor).__name__} is no array of MXNet; convert it by mxnet.nd.array")
    if tensor.stype != "default":
        raise TypeError(
            f"the array has the storage {tensor.stype!r}; convert it by tostype('default'), and create layers with "
            "sparse_grad=False"
        )
    return tensor.asnumpy()


def like(tensor: Any, result: Any, dtype: Any = None) -> Any:
    """Returns a result as an array of the class and device of `tensor`, of its type unless another one is given."""
    dtype = tensor.dtype if dtype is None else dtype
    if isinstance(tensor, mx.np.ndarray):
        return mx.np.array(numpy.asarray(result), dtype=dtype, ctx=tensor.ctx)
    return mx.nd.array(numpy.asarray(result), ctx=tensor.context, dtype=dtype)


def write(tensor: Any, result: Any) -> None:
    """Writes a result of the array's shape into it."""
    if tensor.size == 0:
        return
    if isinstance(tensor, mx.np.ndarray):
        # Otherwise MXNet takes the shape of a scalar for one that it does not know; and a scalar takes no ellipsis.
        with mx.util.np_shape(True):
            value = mx.np.array(numpy.asarray(result), dtype=tensor.dtype, ctx=tensor.ctx)
            tensor[... if tensor.ndim else ()] = value
    else:
        tensor[:] = numpy.asarray(result)


def _numbers(splits: Any, rows: int, size: int) -> list[int]:
    """Returns the splits as integers. Raises ValueError for others, and those that do not fit."""
    given = splits.asnumpy().tolist() if isinstance(splits, mx.nd.NDArray) else list(splits)
    numbers = [int(each) for each in given]
    if any(number != each or number < 0 for number, each in zip(numbers, given)):
        raise ValueError(f"splits are integers from 0, not {given}")
    if len(numbers) != size:
        raise ValueError(f"splits has {len(numbers)} numbers; it has one for each of the {size} ranks")
    if sum(numbers) > rows:
        raise ValueError(f"splits {numbers} add up to more than the {rows} rows of the array")
    return numbers


def _reduce_op(average: bool | None, op: int | None) -> int:
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("The op parameter supersedes average; give only op.")
    warnings.warn("average is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
    return Average if average else Sum
