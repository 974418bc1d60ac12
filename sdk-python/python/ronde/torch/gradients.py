"""The collectives as autograd functions, and their submission.

First gradients follow Horovod's rules: the gradient of an all-reduce is reduced the same way; that of an all-gather is
averaged, and each rank takes its own rows; that of a broadcast is averaged, and the root takes it; that of a
reduce-scatter is gathered.

A backward pass consists of differentiable operations, so gradients of any order are correct. As a function of the
upstream gradients of all ranks together, a backward pass is linear, and its own gradient is the exact adjoint. With a
name, the collectives of the backward pass are named `NAME.backward`; otherwise they have no name either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import numpy
import torch

from ronde.errors import RefusedError
from ronde.frameworks import world
from ronde.frameworks.process_sets import ProcessSet, members_of, root_of, size_of
from ronde.ops import Adasum, Average, Max, Min, Product, Sum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.frameworks.world import InFlight
    from ronde.plugins import Plugin, PluginOp


def begin_allreduce(
    tensor: torch.Tensor,
    name: str | None,
    op: int | PluginOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    out: torch.Tensor | None = None,
    codec: Plugin | None = None,
) -> int:
    """Starts the operation and returns its handle."""
    members, current = members_of(process_set), world.current()

    def begin() -> InFlight:
        source, client = check_tensor(tensor), current.client
        scales = _scales([source], prescale, postscale)
        if op == Adasum and current.hosts is not None and members is None:
            return _written(current.hosts.begin(source, name, *scales, out), [out])
        handle = client.allreduce_async(source, op, name, *scales, out=out, codec=codec, process_set=members)
        return _written(handle, [out])

    return world.handle_of("allreduce", current.submit("allreduce", name, members, begin))


def begin_grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int | PluginOp,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    in_place: bool = False,
    codec: Plugin | None = None,
) -> int:
    """Starts the operation and returns its handle."""
    members, current = members_of(process_set), world.current()

    def begin() -> InFlight:
        sources, client = [check_tensor(tensor) for tensor in tensors], current.client
        options = (op, name, *_scales(sources, prescale, postscale))
        out = sources if in_place else None
        handle = client.grouped_allreduce_async(sources, *options, out=out, codec=codec, process_set=members)
        return _written(handle, out or [])

    return world.handle_of("grouped_allreduce", current.submit("grouped_allreduce", name, members, begin))


def begin_allgather(tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> int:
    """Starts the operation and returns its handle."""
    members, current = members_of(process_set), world.current()

    def begin() -> InFlight:
        return current.client.allgather_async(_gatherable(tensor, "allgather"), name, process_set=members)

    return world.handle_of("allgather", current.submit("allgather", name, members, begin))


def begin_grouped_allgather(tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet) -> int:
    """Starts the operation and returns its handle."""
    members, current = members_of(process_set), world.current()

    def begin() -> InFlight:
        sources = [_gatherable(tensor, "allgather") for tensor in tensors]
        return current.client.grouped_allgather_async(sources, name, process_set=members)

    return world.handle_of("grouped_allgather", current.submit("grouped_allgather", name, members, begin))


def begin_broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    out: torch.Tensor | None = None,
) -> int:
    """Starts the operation and returns its handle."""
    members, current = members_of(process_set), world.current()
    root = root_of(root_rank, process_set)

    def begin() -> InFlight:
        handle = current.client.broadcast_async(check_tensor(tensor), root, name, out=out, process_set=members)
        return _written(handle, [out])

    return world.handle_of("broadcast", current.submit("broadcast", name, members, begin))


def begin_alltoall(tensor: torch.Tensor, splits: Splits | None, name: str | None, process_set: ProcessSet) -> int:
    """Starts the operation and returns its handle. Its result is (tensor, received splits), even without splits."""
    members, current = members_of(process_set), world.current()

    def begin() -> InFlight:
        client, source = current.client, _gatherable(tensor, "alltoall")
        if splits is None:
            rows, rest = divmod(source.shape[0], size_of(process_set))
            equal = None if rest else [rows] * size_of(process_set)  # the client rejects rows that are not divisible
            return client.alltoall_async(source, equal, name, process_set=members)
        sent = source[: sum(splits.rows)]
        handle = client.alltoall_async(sent, splits.rows, name, process_set=members)
        return _Then(handle, lambda result: (result[0], result[1].to(splits.device)))

    return world.handle_of("alltoall", current.submit("alltoall", name, members, begin))


def begin_reducescatter(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet, prescale: float, postscale: float
) -> int:
    """Starts the operation and returns its handle."""
    members, current = members_of(process_set), world.current()

    def begin() -> InFlight:
        source, client = _with_rows(tensor), current.client
        scales = _scales([source], prescale, postscale)
        return client.reduce_scatter_async(source, op, name, *scales, process_set=members)

    return world.handle_of("reducescatter", current.submit("reducescatter", name, members, begin))


def begin_grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
) -> int:
    """Starts the operation and returns its handle."""
    members, current = members_of(process_set), world.current()

    def begin() -> InFlight:
        sources, client = [_with_rows(tensor) for tensor in tensors], current.client
        scales = _scales(sources, prescale, postscale)
        return client.grouped_reduce_scatter_async(sources, op, name, *scales, process_set=members)

    return world.handle_of("grouped_reducescatter", current.submit("grouped_reducescatter", name, members, begin))


class Splits:
    """The rows of each rank, after validation."""

    def __init__(self, rows: list[int], device: torch.device) -> None:
        self.rows = rows
        self.device = device

    @classmethod
    def of(cls, given: Any, tensor: torch.Tensor, process_set: ProcessSet) -> Splits | None:
        """Converts the user's splits. Raises ValueError if they do not fit the tensor and the ranks."""
        check_tensor(tensor)
        if given is None:
            return None
        splits = given if isinstance(given, torch.Tensor) else _integers(given)
        if splits.dtype != torch.int32:
            raise ValueError(f"alltoall expects splits to be 32-bit integers, torch.int32; not {splits.dtype}")
        if splits.dim() != 1:
            raise ValueError(f"alltoall expects splits to be a 1-D tensor; not of shape {tuple(splits.shape)}")
        members_of(process_set)  # raises for a set that does not exist, before its size is used
        rows, ranks = [int(each) for each in splits.tolist()], size_of(process_set)
        if len(rows) != ranks:
            raise ValueError(f"alltoall expects splits to have {ranks} entries, one for each rank; not {len(rows)}")
        if any(each < 0 for each in rows):
            raise ValueError(f"alltoall expects splits to be 0 or more; not {rows}")
        if tensor.dim() and sum(rows) > tensor.shape[0]:
            raise ValueError(
                f"alltoall: the sum of splits, {sum(rows)}, is larger than the first dimension of the tensor, "
                f"{tensor.shape[0]}"
            )
        return cls(rows, splits.device)


class AllReduce(torch.autograd.Function):
    """`allreduce`."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str | None,
        op: int | PluginOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        codec: Plugin | None,
    ) -> torch.Tensor:
        """Reduces the tensor."""
        ctx.name, ctx.options = name, (op, prescale, postscale, process_set)
        return check_tensor(_wait(begin_allreduce(tensor, name, op, prescale, postscale, process_set, codec=codec)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Reduces the gradient the same way, but without a codec, which would lose precision twice."""
        again = AllReduce if _is_linear(ctx.options[0]) else _AllReduceOnce
        reduced = again.apply(gradients[0], _backward(ctx.name), *ctx.options, None)
        return reduced, None, None, None, None, None, None


class _AllReduceOnce(AllReduce):
    """A non-linear all-reduce, whose gradient follows Horovod's rule and has no derivative."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Raises RuntimeError."""
        raise _no_second_gradient("allreduce", ctx.options[0])


class GroupedAllReduce(torch.autograd.Function):
    """`grouped_allreduce`."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int | PluginOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        codec: Plugin | None,
        *tensors: torch.Tensor,
    ) -> Any:
        """Reduces the tensors."""
        ctx.name, ctx.options = name, (op, prescale, postscale, process_set)
        scales = (prescale, postscale)
        return tuple(_wait(begin_grouped_allreduce(tensors, name, op, *scales, process_set, codec=codec)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Reduces the gradients the same way, as a group; without a codec."""
        again = GroupedAllReduce if _is_linear(ctx.options[0]) else _GroupedAllReduceOnce
        reduced = again.apply(_backward(ctx.name), *ctx.options, None, *gradients)
        return (None, None, None, None, None, None, *reduced)


class _GroupedAllReduceOnce(GroupedAllReduce):
    """`_AllReduceOnce` for a group."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Raises RuntimeError."""
        raise _no_second_gradient("grouped_allreduce", ctx.options[0])


class AllGather(torch.autograd.Function):
    """`allgather`. The gradients of all ranks are averaged, or added up with op=Sum, which is the exact adjoint."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, name: str | None, process_set: ProcessSet, op: int = Average
    ) -> torch.Tensor:
        """Gathers all ranks' rows."""
        ctx.rows, ctx.name, ctx.process_set, ctx.op = _rows(tensor), name, process_set, op
        return check_tensor(_wait(begin_allgather(tensor, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Reduces the gradient and returns this rank's rows of it."""
        name = _backward(ctx.name)
        reduced = AllReduce.apply(gradients[0], name, ctx.op, 1.0, 1.0, ctx.process_set, None)
        return _own_rows([reduced], [ctx.rows], name, ctx.process_set)[0], None, None, None


class GroupedAllGather(torch.autograd.Function):
    """`grouped_allgather`; `op` as for `AllGather`."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, op: int, *tensors: torch.Tensor) -> Any:
        """Gathers all ranks' rows of each tensor."""
        ctx.rows, ctx.name, ctx.process_set, ctx.op = [_rows(each) for each in tensors], name, process_set, op
        return tuple(_wait(begin_grouped_allgather(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Reduces the gradients and returns this rank's rows of each."""
        name = _backward(ctx.name)
        reduced = GroupedAllReduce.apply(name, ctx.op, 1.0, 1.0, ctx.process_set, None, *gradients)
        return (None, None, None, *_own_rows(reduced, ctx.rows, name, ctx.process_set))


class Broadcast(torch.autograd.Function):
    """`broadcast`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """Broadcasts the root's tensor."""
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, name, process_set
        return check_tensor(_wait(begin_broadcast(tensor, root_rank, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Returns the average at the root, zeros elsewhere."""
        reduced = AllReduce.apply(gradients[0], _backward(ctx.name), Average, 1.0, 1.0, ctx.process_set, None)
        if world.current().rank != ctx.root_rank:
            # The zeros depend on the average, so that a second backward pass runs the collective here, too.
            nowhere = torch.zeros((), dtype=torch.bool, device=reduced.device)
            reduced = torch.where(nowhere, reduced, torch.zeros_like(reduced))
        return reduced, None, None, None


class AllToAll(torch.autograd.Function):
    """`alltoall`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Splits | None, name: str | None, process_set: ProcessSet
    ) -> Any:
        """Exchanges rows. Returns those for this rank, and how many came from each rank."""
        ctx.name, ctx.process_set, ctx.rows = name, process_set, _rows(tensor)
        result, received = _wait(begin_alltoall(tensor, splits, name, process_set))
        ctx.received = received.tolist()
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Sends each row's gradient back to the rank that the row came from."""
        splits = Splits(ctx.received, torch.device("cpu"))
        returned, _ = AllToAll.apply(gradients[0], splits, _backward(ctx.name), ctx.process_set)
        if returned.shape[0] < ctx.rows:
            unsent = returned.new_zeros((ctx.rows - returned.shape[0], *returned.shape[1:]))
            returned = torch.cat([returned, unsent])
        return returned, None, None, None


class ReduceScatter(torch.autograd.Function):
    """`reducescatter`."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
    ) -> torch.Tensor:
        """Returns this rank's rows of the reduction."""
        ctx.name, ctx.options = name, (op, process_set, prescale, postscale)
        return check_tensor(_wait(begin_reducescatter(tensor, name, op, process_set, prescale, postscale)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Gathers all ranks' rows, scaled."""
        scaled = _scaled(gradients[0], _scatter_factor("reducescatter", *ctx.options))
        gathered = AllGather.apply(scaled, _backward(ctx.name), ctx.options[1], Sum)
        return gathered, None, None, None, None, None


class GroupedReduceScatter(torch.autograd.Function):
    """`grouped_reducescatter`."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
        *tensors: torch.Tensor,
    ) -> Any:
        """Returns this rank's rows of each reduction."""
        ctx.name, ctx.options = name, (op, process_set, prescale, postscale)
        return tuple(_wait(begin_grouped_reducescatter(tensors, name, op, process_set, prescale, postscale)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Gathers all ranks' rows of each gradient, scaled."""
        factor = _scatter_factor("grouped_reducescatter", *ctx.options)
        scaled = [_scaled(gradient, factor) for gradient in gradients]
        gathered = GroupedAllGather.apply(_backward(ctx.name), ctx.options[1], Sum, *scaled)
        return (None, None, None, None, None, *gathered)


class _Then:
    """An operation in flight with a function that transforms its result."""

    def __init__(self, in_flight: InFlight, change: Callable[[Any], Any]) -> None:
        self._in_flight = in_flight
        self._change = change

    def poll(self) -> bool:
        return self._in_flight.poll()

    def wait(self) -> Any:
        return self._change(self._in_flight.wait())


def _written(in_flight: InFlight, places: Sequence[torch.Tensor | None]) -> InFlight:
    """Marks results in place as modified, so that autograd rejects uses of the old contents for a gradient."""
    written = [place for place in places if place is not None and not place.is_inference()]
    if not written:
        return in_flight

    def count(result: Any) -> Any:
        for place in written:
            torch.autograd.graph.increment_version(place)
        return result

    return _Then(in_flight, count)


def _scales(tensors: Sequence[torch.Tensor], prescale: float, postscale: float) -> tuple[float, float]:
    """Returns the factors, rounded as Horovod rounds them for these tensors.

    Horovod multiplies float32 and narrower types by a factor rounded to float32, and scripts compare bits with
    PyTorch's own product. A group has one pair of factors, so they are rounded only if that is right for all tensors.
    """
    if prescale == postscale == 1.0:  # the most frequent case
        return 1.0, 1.0
    if not tensors or not all(tensor.dtype in _SCALED_IN_FLOAT32 for tensor in tensors):
        return prescale, postscale
    with numpy.errstate(over="ignore"):
        return float(numpy.float32(prescale)), float(numpy.float32(postscale))


_SCALED_IN_FLOAT32 = frozenset([torch.float16, torch.bfloat16, torch.float32])


def _wait(handle: int) -> Any:
    return world.synchronize(handle)


def check_tensor(given: Any) -> torch.Tensor:
    """Returns the tensor. Raises ValueError for anything else."""
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"a {type(given).__name__} is not supported; give a torch.Tensor")
    return given


def _with_rows(given: Any) -> torch.Tensor:
    if check_tensor(given).dim() == 0:
        raise ValueError("reducescatter does not support scalar tensors: there are no rows to divide")
    checked: torch.Tensor = given
    return checked


def _rows(given: Any) -> int:
    tensor = check_tensor(given)
    return tensor.shape[0] if tensor.dim() else 1


def _gatherable(given: Any, operation: str) -> torch.Tensor:
    tensor = check_tensor(given)
    if tensor.dim() == 0:
        raise RefusedError(f"Process-set rank zero tried to {operation} a rank-zero tensor: a scalar has no rows")
    return tensor


def _own_rows(
    gathered: Sequence[torch.Tensor], rows: list[int], name: str | None, process_set: ProcessSet
) -> list[torch.Tensor]:
    """Returns this rank's own rows of each gathered tensor, to which each rank contributed `rows`."""
    name = None if name is None else f"{name}.rows"
    every = _wait(begin_allgather(torch.tensor([rows]), name, process_set))
    me = int(process_set.rank() or 0)
    starts = every[:me].sum(dim=0).tolist()
    return [each[start : start + own] for each, start, own in zip(gathered, starts, rows)]


def _backward(name: str | None) -> str | None:
    """Returns the name of the collective in the backward pass."""
    return None if name is None else f"{name}.backward"


def _is_linear(op: int | PluginOp) -> bool:
    return op in (Average, Sum)


def _op_name(op: int | PluginOp) -> str:
    return _OP_NAMES.get(op, str(op)) if isinstance(op, int) else str(op)


_OP_NAMES = {Average: "Average", Sum: "Sum", Adasum: "Adasum", Min: "Min", Max: "Max", Product: "Product"}


def _no_second_gradient(operation: str, op: int | PluginOp) -> RuntimeError:
    return RuntimeError(
        f"the gradient of {operation} with op={_op_name(op)} cannot be differentiated again: it is reduced the same "
        "way as the tensor, which is linear for op=Average and op=Sum only; use one of these, or no create_graph=True"
    )


def _scatter_factor(
    operation: str, op: int | PluginOp, process_set: ProcessSet, prescale: float, postscale: float
) -> float:
    if not _is_linear(op):
        raise RuntimeError(
            f"{operation} with op={_op_name(op)} has no gradient; use op=Average or op=Sum, or detach the tensor"
        )
    return (size_of(process_set) if op == Sum else 1) * prescale * postscale


def _integers(given: Any) -> torch.Tensor:
    """Converts any iterable of integers to a tensor. Other numbers keep their type, so that validation rejects them."""
    try:
        splits = torch.as_tensor(given if hasattr(given, "__len__") else list(given))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"alltoall expects splits to be 32-bit integers, not {given!r}: {error}") from error
    return splits if splits.is_floating_point() else splits.to(torch.int32)


def _scaled(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    return gradient if factor == 1.0 else gradient * factor


def gathered(tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    """`allgather` without a gradient."""
    result: torch.Tensor = _wait(begin_allgather(tensor, name, process_set))
    return result
