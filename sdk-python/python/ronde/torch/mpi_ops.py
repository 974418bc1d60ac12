"""Collectives on PyTorch tensors, with Horovod's names, arguments and rules.

Common to all of them:

tensor      -- dense, on any device; of a type that `ronde.Client.allreduce` accepts, the same on all ranks
tensors     -- for grouped calls: any iterable of such tensors, also a generator, in the same order on all ranks
name        -- identifies the operation on all ranks; operations without one are matched in call order
process_set -- the ranks that take part; default: all. A root is always a rank of the job.

A function whose name ends in `_async` returns a handle for `synchronize` and `poll`. You may overwrite the tensor as
soon as it returns, but one on a GPU only after `synchronize`, because it is copied meanwhile. A function with a
trailing `_` writes the result into its tensor; others return a new tensor on the same device.

A differentiable function is so to any order, and its backward pass runs collectives. Whether the input requires a
gradient, and the order of such calls, must be the same on all ranks. docs/PYTORCH.md lists the gradients.

All raise HorovodInternalError if the operation fails; `ronde.errors` defines its subclasses. They raise ValueError,
before anything is submitted, for invalid arguments, for a name that is already in flight, for a process set that is not
registered or does not contain this process, and before `init`.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from ronde.frameworks import world
from ronde.frameworks.basics import (
    client,
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)
from ronde.frameworks.process_sets import ProcessSet, global_process_set, members_of
from ronde.frameworks.world import poll, synchronize
from ronde.ops import Average, Sum
from ronde.torch import gradients
from ronde.torch.compression import Compression, Compressor, PluginCompressor, check_no_plugin, codec_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ronde.plugins import PluginOp

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "client",
    "cross_rank",
    "cross_size",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "size",
    "synchronize",
]


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | PluginCompressor = Compression.none,
    op: int | PluginOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Reduces all ranks' tensors, of the same shape. Differentiable: its gradient is reduced the same way.

    With op=Average and op=Sum that gradient is differentiable, too, to any order; with another `op` a second derivative
    raises RuntimeError.

    average     -- deprecated: use op=Average or op=Sum; together with `op` it raises ValueError
    compression -- compresses the tensor before and decompresses the result after; with `Compression.plugin` a plugin
                   does so between sidecars, but not for the gradient
    op          -- any reduction of `ronde.Client.allreduce`, also `PluginOp`; default: Average
    prescale_factor, postscale_factor -- multiply each tensor before the reduction, and its result

    The average of integers is truncated toward zero. float16 and bfloat16 are added in float32: all ranks of one
    sidecar first, then rounded at each addition between sidecars.
    """
    op = _reduce_op(average, op)
    codec = codec_of(compression, op)
    compressed, context = compression.compress(tensor)
    reduced = gradients.AllReduce.apply(compressed, name, op, prescale_factor, postscale_factor, process_set, codec)
    decompressed: torch.Tensor = compression.decompress(reduced, context)
    return decompressed


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | PluginOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `allreduce`, without gradient and compression; returns its handle."""
    op = _reduce_op(average, op)
    return gradients.begin_allreduce(tensor, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | PluginOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """`allreduce` into `tensor`, without gradient and compression. After an error its contents are unspecified."""
    op = _reduce_op(average, op)
    return _tensor(allreduce_async_(tensor, None, name, op, prescale_factor, postscale_factor, process_set))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | PluginOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `allreduce_`; `synchronize` writes the result, or a `poll` that finds it complete."""
    op = _reduce_op(average, op)
    return gradients.begin_allreduce(tensor, name, op, prescale_factor, postscale_factor, process_set, out=tensor)


def grouped_allreduce(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | PluginCompressor = Compression.none,
    op: int | PluginOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allreduce` of several tensors as a group, which starts when all are ready on all ranks. Differentiable."""
    op = _reduce_op(average, op)
    tensors = _listed(tensors)
    pairs = [compression.compress(tensor) for tensor in tensors]
    if not pairs:
        return []
    options = (name, op, prescale_factor, postscale_factor, process_set, codec_of(compression, op))
    reduced = gradients.GroupedAllReduce.apply(*options, *(compressed for compressed, _ in pairs))
    return [compression.decompress(each, context) for each, (_, context) in zip(reduced, pairs)]


def grouped_allreduce_async(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | PluginOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `grouped_allreduce`, without gradient and compression; the result is a list."""
    op = _reduce_op(average, op)
    tensors = _listed(tensors)
    return gradients.begin_grouped_allreduce(tensors, name, op, prescale_factor, postscale_factor, process_set)


def grouped_allreduce_(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | PluginOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`grouped_allreduce` into the tensors."""
    op = _reduce_op(average, op)
    handle = grouped_allreduce_async_(tensors, None, name, op, prescale_factor, postscale_factor, process_set)
    result: list[torch.Tensor] = synchronize(handle)
    return result


def grouped_allreduce_async_(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | PluginOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `grouped_allreduce_`; `synchronize` writes the results, or a `poll` that finds them complete."""
    op = _reduce_op(average, op)
    tensors = _listed(tensors)
    return gradients.begin_grouped_allreduce(
        tensors, name, op, prescale_factor, postscale_factor, process_set, in_place=True
    )


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenates all ranks' tensors along the first dimension, in which they may differ. Differentiable.

    The result is of shape (sum of all ranks' rows, *rest). Scalars raise ValueError.
    """
    result: torch.Tensor = gradients.AllGather.apply(tensor, name, process_set)
    return result


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts `allgather`, without gradient; returns its handle."""
    return gradients.begin_allgather(tensor, name, process_set)


def grouped_allgather(
    tensors: Iterable[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """`allgather` of several tensors as a group, which starts when all are ready on all ranks. Differentiable."""
    tensors = _listed(tensors)
    return list(gradients.GroupedAllGather.apply(name, process_set, Average, *tensors)) if tensors else []


def grouped_allgather_async(
    tensors: Iterable[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts `grouped_allgather`, without gradient; the result is a list."""
    tensors = _listed(tensors)
    return gradients.begin_grouped_allgather(tensors, name, process_set)


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Broadcasts the tensor of rank `root_rank`, of the same shape on all ranks. Differentiable.

    Raises ValueError for a root that is not in the process set.
    """
    result: torch.Tensor = gradients.Broadcast.apply(tensor, root_rank, name, process_set)
    return result


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `broadcast`, without gradient; returns its handle."""
    return gradients.begin_broadcast(tensor, root_rank, name, process_set)


def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """`broadcast` into `tensor`."""
    return _tensor(broadcast_async_(tensor, root_rank, name, process_set))


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `broadcast_`; `synchronize` writes the result, or a `poll` that finds it complete."""
    return gradients.begin_broadcast(tensor, root_rank, name, process_set, out=tensor)


def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows to every rank and returns the rows received from all ranks, in rank order. Differentiable.

    splits -- how many rows each rank gets, in rank order, starting at the first row: int32 in one dimension, or any
              iterable of integers; may be 0. Without it every rank gets the same number, by which the rows must be
              divisible; ranks may have different numbers of rows then, too.

    Returns the tensor, or (tensor, received_splits) if splits were given: how many rows came from each rank, as int32
    on the device of the splits. Raises ValueError for invalid splits, and for those with a sum beyond the rows.
    """
    checked = gradients.Splits.of(splits, tensor, process_set)
    result, received = gradients.AllToAll.apply(tensor, checked, name, process_set)
    return result if splits is None else (result, received)


def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts `alltoall`, without gradient; the result is (tensor, received_splits), even without splits."""
    checked = gradients.Splits.of(splits, tensor, process_set)
    return gradients.begin_alltoall(tensor, checked, name, process_set)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] | PluginCompressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduces all ranks' tensors and returns this rank's rows of the result. Differentiable for Average and Sum.

    Of r rows over n ranks the first r % n ranks get one more than r // n. `op` is Average, Sum, Min, Max or Product; a
    backward pass through one of the last three raises RuntimeError. Raises ValueError for a scalar.
    """
    check_no_plugin(compression, "reducescatter")
    compressed, context = compression.compress(tensor)
    options = (name, op, process_set, prescale_factor, postscale_factor)
    decompressed: torch.Tensor = compression.decompress(gradients.ReduceScatter.apply(compressed, *options), context)
    return decompressed


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts `reducescatter`, without gradient and compression; returns its handle."""
    return gradients.begin_reducescatter(tensor, name, op, process_set, prescale_factor, postscale_factor)


def grouped_reducescatter(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] | PluginCompressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors as a group, which starts when all are ready on all ranks. Differentiable."""
    check_no_plugin(compression, "grouped_reducescatter")
    tensors = _listed(tensors)
    pairs = [compression.compress(tensor) for tensor in tensors]
    if not pairs:
        return []
    options = (name, op, process_set, prescale_factor, postscale_factor)
    reduced = gradients.GroupedReduceScatter.apply(*options, *(compressed for compressed, _ in pairs))
    return [compression.decompress(each, context) for each, (_, context) in zip(reduced, pairs)]


def grouped_reducescatter_async(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts `grouped_reducescatter`, without gradient and compression; the result is a list."""
    tensors = _listed(tensors)
    return gradients.begin_grouped_reducescatter(tensors, name, op, process_set, prescale_factor, postscale_factor)


def join(device: int = -1, process_set: ProcessSet = global_process_set) -> int:
    """Declares that this rank has no more tensors for a process set; default: that of all ranks.

    device      -- accepted for compatibility with Horovod; ignored
    process_set -- the set; Horovod has joins of all ranks only

    Returns, once all ranks of the set have joined, the rank that joined last: its number among all ranks, those of
    `init(comm)` if that was given some.

    Until then `allreduce` with Average, Sum or Adasum on the other ranks of the set uses zeros for this rank, which
    still counts in the divisor of an average. Other operations on the set fail; other sets are not affected.

    Raises ValueError for a set that is not registered, or does not contain this rank.
    """
    del device
    members, current = members_of(process_set), world.current()
    with world.traced("join", None):
        last = current.client.join(process_set=members)
    # Ranks have made different numbers of steps; from here on their counts agree again.
    world.restart_counting(process_set.process_set_id or 0)
    return current.job_ranks.index(last)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Returns when every rank of the set has called it."""
    members = members_of(process_set)
    with world.traced("barrier", None):
        client().barrier(process_set=members)


def _reduce_op(average: bool | None, op: int | PluginOp | None) -> int | PluginOp:
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average; give only op.")
        warnings.warn("average is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return Average if op is None else op


def _listed(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the tensors of a group, which are on one device. Reads any iterable, also a generator, once."""
    listed = [gradients.check_tensor(tensor) for tensor in tensors]
    devices = {str(tensor.device) for tensor in listed}
    if len(devices) > 1:
        raise RuntimeError(f"the tensors of a group must be on the same device, not on {', '.join(sorted(devices))}")
    return listed


def _tensor(handle: int) -> torch.Tensor:
    result: torch.Tensor = synchronize(handle)
    return result
