"""Horovod's autograd functions: collectives through `apply`, with Horovod's order of arguments.

Each `apply` calls the function of `ronde.torch` and has its gradients. The `grad_fn` of a result is a class of ronde.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

import ronde.torch as hvd

if TYPE_CHECKING:
    from ronde.torch import ProcessSet


class HorovodAllreduce(torch.autograd.Function):
    """`ronde.torch.allreduce`."""

    @classmethod
    def apply(
        cls,
        tensor: torch.Tensor,
        average: bool | None,
        name: str | None,
        op: Any,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = hvd.global_process_set,
    ) -> torch.Tensor:
        """Returns the reduction. Raises as `ronde.torch.allreduce` does."""
        return hvd.allreduce(
            tensor,
            average,
            name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )


class HorovodGroupedAllreduce(torch.autograd.Function):
    """`ronde.torch.grouped_allreduce`."""

    @classmethod
    def apply(
        cls,
        average: bool | None,
        name: str | None,
        op: Any,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Returns the reductions. Raises as `ronde.torch.grouped_allreduce` does."""
        reduced = hvd.grouped_allreduce(
            tensors,
            average,
            name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
        )
        return tuple(reduced)


class HorovodAllgather(torch.autograd.Function):
    """`ronde.torch.allgather`."""

    @classmethod
    def apply(
        cls, tensor: torch.Tensor, name: str | None, process_set: ProcessSet = hvd.global_process_set
    ) -> torch.Tensor:
        """Returns all ranks' rows. Raises as `ronde.torch.allgather` does."""
        return hvd.allgather(tensor, name, process_set)


class HorovodGroupedAllgather(torch.autograd.Function):
    """`ronde.torch.grouped_allgather`."""

    @classmethod
    def apply(cls, name: str | None, process_set: ProcessSet, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns all ranks' rows of each tensor. Raises as `ronde.torch.grouped_allgather` does."""
        return tuple(hvd.grouped_allgather(tensors, name, process_set))


class HorovodBroadcast(torch.autograd.Function):
    """`ronde.torch.broadcast`."""

    @classmethod
    def apply(
        cls, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet = hvd.global_process_set
    ) -> torch.Tensor:
        """Returns the root's tensor. Raises as `ronde.torch.broadcast` does."""
        return hvd.broadcast(tensor, root_rank, name, process_set)


class HorovodAlltoall(torch.autograd.Function):
    """`ronde.torch.alltoall`, always with the received splits."""

    @classmethod
    def apply(
        cls, tensor: torch.Tensor, splits: Any, name: str | None, process_set: ProcessSet = hvd.global_process_set
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the received rows, and how many came from each rank, as int32. Raises as `ronde.torch.alltoall`."""
        if splits is None:
            splits = _equal_splits(tensor, process_set)
        output, received = hvd.alltoall(tensor, splits, name, process_set)
        return output, received


class HorovodReducescatter(torch.autograd.Function):
    """`ronde.torch.reducescatter`."""

    @classmethod
    def apply(
        cls,
        tensor: torch.Tensor,
        name: str | None,
        op: Any,
        process_set: ProcessSet = hvd.global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> torch.Tensor:
        """Returns this rank's rows of the reduction. Raises as `ronde.torch.reducescatter` does."""
        return hvd.reducescatter(
            tensor,
            name,
            op=op,
            process_set=process_set,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )


class HorovodGroupedReducescatter(torch.autograd.Function):
    """`ronde.torch.grouped_reducescatter`."""

    @classmethod
    def apply(
        cls,
        name: str | None,
        op: Any,
        process_set: ProcessSet,
        prescale_factor: float,
        postscale_factor: float,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Returns this rank's rows of the reductions. Raises as `ronde.torch.grouped_reducescatter` does."""
        reduced = hvd.grouped_reducescatter(
            tensors,
            name,
            op=op,
            process_set=process_set,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
        )
        return tuple(reduced)


def _equal_splits(tensor: torch.Tensor, process_set: ProcessSet) -> list[int]:
    """Returns equal splits. Raises ValueError if the rows are not divisible."""
    size = process_set.size()
    rows = tensor.shape[0] if tensor.dim() else 0
    if size is None:  # not initialized or not registered, which `alltoall` raises an error for
        return [rows]
    if rows % size:
        raise ValueError(
            f"alltoall without splits needs rows that {size} ranks can share equally, not {rows} rows; give splits"
        )
    return [rows // size] * size
