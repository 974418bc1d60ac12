"""The collectives as functions of autograd, and how each is submitted.

First gradients follow Horovod's rules: the gradient of an all-reduce is reduced the same way; that of an all-gather is
averaged, and each rank takes its own rows; that of a broadcast is averaged, and the root takes it; that of a
reduce-scatter is gathered.

A backward pass consists of differentiable operations, so gradients of any order are right. Seen as a function of the
upstream gradients of all ranks together, a backward pass is linear, and its own gradient is the exact adjoint. Where a
name was given, the collectives of the backward pass are called `NAME.backward`; otherwise they have no name either.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import numpy
import torch

from ronde.errors import RefusedError
from ronde.ops import Adasum, Average, Max, Min, Product, Sum
from ronde.torch import world
from ronde.torch.process_sets import ProcessSet, members_of, size_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.plugins import Plugin, PluginOp
    from ronde.torch.world import InFlight


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
    """A handle of the operation."""
    members, current = members_of(process_set), world.current()

    def begin() -> InFlight:
        source, client = check_tensor(tensor), current.client
        scales = _scales([source], prescale, postscale)
        if op == Adasum and current.hosts is not None:
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
    """A handle of the operation."""
    members, current = members_of(process_set), world.current()

    def begin() -> InFlight:
        sources, client = [check_tensor(tensor) for tensor in tensors], current.client
        options = (op, name, *_scales(sources, prescale, postscale))
        out = sources if in_place else None
        handle = client.grouped_allreduce_async(sources, *options, out=out, codec=codec, process_set=members)
        return _written(handle, out or [])

    return world.handle_of("grouped_allreduce", current.submit("grouped_allreduce", name, members, begin))


def begin_allgather(tensor: torch.Tensor, name: str | None, process_set: ProcessSet) -> int:
    """A handle of the operation."""
    members, current = members_of(process_set), world.current()

    def begin() -> InFlight:
        return current.client.allgather_async(_gatherable(tensor, "allgather"), name, process_set=members)

    return world.handle_of("allgather", current.submit("allgather", name, members, begin))


def begin_grouped_allgather(tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet) -> int:
    """A handle of the operation."""
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
    """A handle of the operation."""
    members, current = members_of(process_set), world.current()
    ranks = range(current.size) if process_set.ranks is None else process_set.ranks
    if root_rank not in ranks:
        raise ValueError(f"broadcast received invalid root rank {root_rank}: it is not among the ranks {list(ranks)}")
    root = current.job_ranks[root_rank]

    def begin() -> InFlight:
        handle = current.client.broadcast_async(check_tensor(tensor), root, name, out=out, process_set=members)
        return _written(handle, [out])

    return world.handle_of("broadcast", current.submit("broadcast", name, members, begin))


def begin_alltoall(tensor: torch.Tensor, splits: Splits | None, name: str | None, process_set: ProcessSet) -> int:
    """A handle of the operation. Its result is (tensor, received splits), also without splits."""
    members, current = members_of(process_set), world.current()

    def begin() -> InFlight:
        client, source = current.client, _gatherable(tensor, "alltoall")
        if splits is None:
            rows, rest = divmod(source.shape[0], size_of(process_set))
            equal = None if rest else [rows] * size_of(process_set)  # the client refuses rows that are not divisible
            return client.alltoall_async(source, equal, name, process_set=members)
        sent = source[: sum(splits.rows)]
        handle = client.alltoall_async(sent, splits.rows, name, process_set=members)
        return _Then(handle, lambda result: (result[0], result[1].to(splits.device)))

    return world.handle_of("alltoall", current.submit("alltoall", name, members, begin))


def begin_reducescatter(
    tensor: torch.Tensor, name: str | None, op: int, process_set: ProcessSet, prescale: float, postscale: float
) -> int:
    """A handle of the operation."""
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
    """A handle of the operation."""
    members, current = members_of(process_set), world.current()

    def begin() -> InFlight:
        sources, client = [_with_rows(tensor) for tensor in tensors], current.client
        scales = _scales(sources, prescale, postscale)
        return client.grouped_reduce_scatter_async(sources, op, name, *scales, process_set=members)

    return world.handle_of("grouped_reducescatter", current.submit("grouped_reducescatter", name, members, begin))


class Splits:
    """How many rows each rank gets, checked."""

    def __init__(self, rows: list[int], device: torch.device) -> None:
        self.rows = rows
        self.device = device

    @classmethod
    def of(cls, given: Any, tensor: torch.Tensor, process_set: ProcessSet) -> Splits | None:
        """What the user gave. Raises ValueError when it does not fit the tensor and the ranks."""
        check_tensor(tensor)
        if given is None:
            return None
        splits = given if isinstance(given, torch.Tensor) else _integers(given)
        if splits.dtype != torch.int32:
            raise ValueError(f"alltoall expects splits to be 32-bit integers, torch.int32; not {splits.dtype}")
        if splits.dim() != 1:
            raise ValueError(f"alltoall expects splits to be a 1-D tensor; not of shape {tuple(splits.shape)}")
        members_of(process_set)  # tells of a set that is not there before its size is asked for
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
        """The reduction."""
        ctx.name, ctx.options = name, (op, prescale, postscale, process_set)
        return check_tensor(_wait(begin_allreduce(tensor, name, op, prescale, postscale, process_set, codec=codec)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Reduces the gradient the same way, but without a codec: what a codec loses would be lost twice."""
        again = AllReduce if _is_linear(ctx.options[0]) else _AllReduceOnce
        reduced = again.apply(gradients[0], _backward(ctx.name), *ctx.options, None)
        return reduced, None, None, None, None, None, None


class _AllReduceOnce(AllReduce):
    """The gradient of an all-reduce that is not linear; it is reduced by Horovod's rule, which has no derivative."""

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
        """The reductions."""
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
    """As `_AllReduceOnce`, for a group."""

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
        """All ranks' rows."""
        ctx.rows, ctx.name, ctx.process_set, ctx.op = _rows(tensor), name, process_set, op
        return check_tensor(_wait(begin_allgather(tensor, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """The reduced gradient, of which this rank takes its own rows."""
        name = _backward(ctx.name)
        reduced = AllReduce.apply(gradients[0], name, ctx.op, 1.0, 1.0, ctx.process_set, None)
        return _own_rows([reduced], [ctx.rows], name, ctx.process_set)[0], None, None, None


class GroupedAllGather(torch.autograd.Function):
    """`grouped_allgather`; `op` as for `AllGather`."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, op: int, *tensors: torch.Tensor) -> Any:
        """All ranks' rows of each."""
        ctx.rows, ctx.name, ctx.process_set, ctx.op = [_rows(each) for each in tensors], name, process_set, op
        return tuple(_wait(begin_grouped_allgather(tensors, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """The reduced gradients, of which this rank takes its own rows."""
        name = _backward(ctx.name)
        reduced = GroupedAllReduce.apply(name, ctx.op, 1.0, 1.0, ctx.process_set, None, *gradients)
        return (None, None, None, *_own_rows(reduced, ctx.rows, name, ctx.process_set))


class Broadcast(torch.autograd.Function):
    """`broadcast`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> torch.Tensor:
        """The root's tensor."""
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, name, process_set
        return check_tensor(_wait(begin_broadcast(tensor, root_rank, name, process_set)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """The average at the root, zeros elsewhere."""
        reduced = AllReduce.apply(gradients[0], _backward(ctx.name), Average, 1.0, 1.0, ctx.process_set, None)
        if world.current().rank != ctx.root_rank:
            # Zeros that still depend on the average: a second backward pass has to run the collective here too.
            nowhere = torch.zeros((), dtype=torch.bool, device=reduced.device)
            reduced = torch.where(nowhere, reduced, torch.zeros_like(reduced))
        return reduced, None, None, None


class AllToAll(torch.autograd.Function):
    """`alltoall`."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Splits | None, name: str | None, process_set: ProcessSet
    ) -> Any:
        """The rows for this rank, and how many came from each."""
        ctx.name, ctx.process_set, ctx.rows = name, process_set, _rows(tensor)
        result, received = _wait(begin_alltoall(tensor, splits, name, process_set))
        ctx.received = received.tolist()
        ctx.mark_non_differentiable(received)
        return result, received

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Each row's gradient goes back to where the row came from."""
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
        """This rank's rows."""
        ctx.name, ctx.options = name, (op, process_set, prescale, postscale)
        return check_tensor(_wait(begin_reducescatter(tensor, name, op, process_set, prescale, postscale)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """All ranks' rows, scaled."""
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
        """This rank's rows of each."""
        ctx.name, ctx.options = name, (op, process_set, prescale, postscale)
        return tuple(_wait(begin_grouped_reducescatter(tensors, name, op, process_set, prescale, postscale)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """All ranks' rows of each, scaled."""
        factor = _scatter_factor("grouped_reducescatter", *ctx.options)
        scaled = [_scaled(gradient, factor) for gradient in gradients]
        gathered = GroupedAllGather.apply(_backward(ctx.name), ctx.options[1], Sum, *scaled)
        return (None, None, None, None, None, *gathered)


class _Then:
    """An operation in flight whose result is changed when it is there."""

    def __init__(self, in_flight: InFlight, change: Callable[[Any], Any]) -> None:
        self._in_flight = in_flight
        self._change = change

    def poll(self) -> bool:
        return self._in_flight.poll()

    def wait(self) -> Any:
        return self._change(self._in_flight.wait())


def _written(in_flight: InFlight, places: Sequence[torch.Tensor | None]) -> InFlight:
    """Lets autograd know of results in place, so that it refuses to use what was there for a gradient."""
    written = [place for place in places if place is not None and not place.is_inference()]
    if not written:
        return in_flight

    def count(result: Any) -> Any:
        for place in written:
            torch.autograd.graph.increment_version(place)
        return result

    return _Then(in_flight, count)


def _scales(tensors: Sequence[torch.Tensor], prescale: float, postscale: float) -> tuple[float, float]:
    """The factors as they count for these tensors.

    Horovod multiplies float32, and what is narrower, by a factor that was rounded to float32, and scripts compare bits
    with PyTorch's own product. A group has one pair of factors, so they are rounded only where that is right for all.
    """
    if prescale == postscale == 1.0:  # what nearly every operation has
        return 1.0, 1.0
    if not tensors or not all(tensor.dtype in _SCALED_IN_FLOAT32 for tensor in tensors):
        return prescale, postscale
    with numpy.errstate(over="ignore"):
        return float(numpy.float32(prescale)), float(numpy.float32(postscale))


_SCALED_IN_FLOAT32 = frozenset([torch.float16, torch.bfloat16, torch.float32])


def _wait(handle: int) -> Any:
    return world.synchronize(handle)


def check_tensor(given: Any) -> torch.Tensor:
    """The tensor. Raises ValueError for anything else."""
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
    """Of each tensor the rows that this rank gave, where each rank gave `rows`."""
    name = None if name is None else f"{name}.rows"
    every = _wait(begin_allgather(torch.tensor([rows]), name, process_set))
    me = int(process_set.rank() or 0)
    starts = every[:me].sum(dim=0).tolist()
    return [each[start : start + own] for each, start, own in zip(gathered, starts, rows)]


def _backward(name: str | None) -> str | None:
    """What the collective of a backward pass is called."""
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
    """Any iterable of integers as a tensor; other numbers keep their type, for which they are refused."""
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
