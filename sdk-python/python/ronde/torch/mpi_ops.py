"""Collectives on PyTorch tensors, with the process's one client behind them."""

from __future__ import annotations

import atexit
import warnings
from typing import Any

import torch

from ronde.client import Client, connect
from ronde.handle import Handle
from ronde.ops import Average, Sum
from ronde.torch.compression import Compression, Compressor

_client: Client | None = None
_is_registered = False


def init(comm: None = None, process_sets: None = None, **settings: Any) -> None:
    """Connects this process; does nothing when it is connected already. Takes the arguments of `ronde.connect`.

    Raises what `ronde.connect` does, ValueError when `comm` is given, and NotImplementedError for `process_sets`.
    """
    global _client, _is_registered  # noqa: PLW0603
    if comm is not None:
        raise ValueError("ronde has not been built with MPI support: leave comm out, ranks come from `ronde run`")
    if process_sets is not None:
        raise NotImplementedError("ronde.torch takes no process sets yet: leave them out; `ronde.connect` has them")
    if _client is not None:
        return
    _client = connect(**settings)
    if not _is_registered:
        atexit.register(shutdown)
        _is_registered = True


def shutdown() -> None:
    """Ends the session; runs by itself when the program ends.

    Results not yet read are lost. Does nothing when there is no session. `init` may be called again.
    """
    global _client
    if _client is not None:
        client, _client = _client, None
        client.close()


def is_initialized() -> bool:
    """Whether `init` has been called, and `shutdown` not since."""
    return _client is not None


def client() -> Client:
    """The process's client. Raises ValueError before `init`, as does everything here that needs it."""
    if _client is None:
        raise ValueError("ronde has not been initialized; call ronde.torch.init() first.")
    return _client


def rank() -> int:
    """This worker's number in the job, from 0."""
    return client().rank


def size() -> int:
    """The number of workers in the job."""
    return client().size


def local_rank() -> int:
    """This worker's number among those of the same sidecar."""
    return client().local_rank


def local_size() -> int:
    """The number of workers of the same sidecar."""
    return client().local_size


def cross_rank() -> int:
    """The number of this sidecar among those that have a worker of this local rank."""
    return client().cross_rank


def cross_size() -> int:
    """The number of sidecars that have a worker of this local rank."""
    return client().cross_size


def is_homogeneous() -> bool:
    """Whether all sidecars serve the same number of workers."""
    return client().is_homogeneous


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """The reduction of all ranks' tensors as a new tensor. Differentiable: its gradient is reduced the same way.

    tensor      -- dense, on any device; of the types of `ronde.Client.allreduce`, the same type and shape on all ranks
    average     -- deprecated: op=Average or op=Sum
    compression -- what is done to the tensor before, and undone after; the result has the type of `tensor`
    op          -- Average unless given; any of `ronde.Client.allreduce`

    The result has the type, shape and device of `tensor`. Scales, the average of integers, bool and what is raised are
    as for `ronde.Client.allreduce`; ValueError also when both `average` and `op` are given.
    """
    compressed, context = compression.compress(tensor)
    op = _reduce_op(average, op)
    reduced = _AllReduce.apply(compressed, name, op, prescale_factor, postscale_factor)
    return compression.decompress(reduced, context)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`allreduce` in flight, without gradient and compression; `synchronize` gives the new tensor.

    Raises what `ronde.Client.allreduce_async` does.
    """
    op = _reduce_op(average, op)
    return client().allreduce_async(tensor, op, name, prescale_factor, postscale_factor)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """The reduction of all ranks' tensors, written into `tensor`, whose elements mean nothing after an error.

    Rules and errors are those of `allreduce`.
    """
    return synchronize(allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """`allreduce_` in flight; `synchronize` writes the result into `tensor`. Raises what `allreduce_async` does."""
    op = _reduce_op(average, op)
    return client().allreduce_async(tensor, op, name, prescale_factor, postscale_factor, out=tensor)


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """All ranks' tensors along the first dimension, in which they may differ. Differentiable.

    The result is of shape (sum of all ranks' rows, *rest), with the type and device of `tensor`. Types and the other
    dimensions are the same on all ranks. Raises what `ronde.Client.allgather` does; scalars are refused.
    """
    result: torch.Tensor = _AllGather.apply(tensor, name)
    return result


def allgather_async(tensor: torch.Tensor, name: str | None = None) -> Handle:
    """`allgather` in flight, without gradient. Raises what `ronde.Client.allgather_async` does."""
    return client().allgather_async(tensor, name)


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """The tensor of rank `root_rank` as a new tensor of the same type, shape and device. Differentiable.

    Type, shape and root are the same on all ranks. Raises what `ronde.Client.broadcast` does; ValueError for a root out
    of range.
    """
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank, name)
    return result


def broadcast_async(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """`broadcast` in flight, without gradient. Raises what `ronde.Client.broadcast_async` does."""
    return client().broadcast_async(tensor, root_rank, name)


def broadcast_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """The tensor of rank `root_rank`, written into `tensor`. Rules and errors are those of `broadcast`."""
    return synchronize(broadcast_async_(tensor, root_rank, name))


def broadcast_async_(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> Handle:
    """`broadcast_` in flight; `synchronize` writes the result into `tensor`. Raises what `broadcast_async` does."""
    return client().broadcast_async(tensor, root_rank, name, out=tensor)


def barrier() -> None:
    """Returns when every rank has called it. Raises what `ronde.Client.barrier` does."""
    client().barrier()


def poll(handle: Handle) -> bool:
    """Whether `synchronize` would return at once."""
    return handle.poll()


def synchronize(handle: Handle) -> torch.Tensor:
    """Waits for an operation in flight and gives its result; again the same. Raises what `ronde.Handle.wait` does."""
    result: torch.Tensor = handle.wait()
    return result


def _reduce_op(average: bool | None, op: int | None) -> int:
    if average is not None:
        if op is not None:
            raise ValueError("The op parameter supersedes average; give only op.")
        warnings.warn("average is deprecated; use op=Average or op=Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    return Average if op is None else op


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, op: int, prescale: float, postscale: float
    ) -> torch.Tensor:
        ctx.options = (op, prescale, postscale)
        return synchronize(client().allreduce_async(tensor, op, name, prescale, postscale))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        op, prescale, postscale = ctx.options
        reduced = client().allreduce(gradients[0], op, None, prescale, postscale)
        return reduced, None, None, None, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str | None) -> torch.Tensor:
        ctx.rows = tensor.shape[0] if tensor.dim() else 1
        return synchronize(client().allgather_async(tensor, name))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        rows = client().allgather(torch.tensor([ctx.rows]))
        start = int(rows[: rank()].sum())
        reduced = client().allreduce(gradients[0], Average)
        return reduced[start : start + ctx.rows], None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None) -> torch.Tensor:
        ctx.root_rank = root_rank
        return synchronize(client().broadcast_async(tensor, root_rank, name))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        reduced = client().allreduce(gradients[0], Average)
        return (reduced if rank() == ctx.root_rank else torch.zeros_like(reduced)), None, None
