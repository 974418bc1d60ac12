"""A group of `torch.distributed` whose collectives ronde does."""

from __future__ import annotations

import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import torch
import torch.distributed

from ronde.ops import Average, Max, Min, Product, Sum
from ronde.torch.distributed.work import Completions, Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.client import Client
    from ronde.handle import GroupHandle, Handle
    from ronde.process_set import ProcessSet

# Without its types: it has more forms of each method than PyTorch's functions call.
_ProcessGroup: Any = torch.distributed.ProcessGroup
# Operations of a kind that may be in flight at once.
NUMBERS = 16
_OPS = {"SUM": Sum, "AVG": Average, "PRODUCT": Product, "MIN": Min, "MAX": Max}


class Names(NamedTuple):
    """What a group is called.

    name  -- by PyTorch
    label -- in the names of its operations, which it tells from those of other groups of the same ranks
    """

    name: str
    label: str


class Group(_ProcessGroup):  # type: ignore[misc]
    """The ranks of a process set, under the methods that `torch.distributed` calls.

    Ranks here are those within the group.

    A whole group and not a backend of one, as PyTorch calls a group that is made in Python directly, and hands its
    operations to the program as they are. Methods have a second name where PyTorch 2.15 has changed it.

    leave -- told when it is shut down, and whether in a hurry
    """

    def __init__(
        self,
        client: Client,
        members: ProcessSet,
        names: Names,
        timeout: datetime.timedelta,
        completions: Completions,
        leave: Callable[[Group, bool], None],
    ) -> None:
        super().__init__(members.rank(), members.size())
        self._leave = leave
        self._client, self._members, self._names = client, members, names
        self._timeout, self._completions = timeout, completions
        self._started: dict[str, int] = {}
        # Held here, as an operation goes on whose work the program lets go of.
        self._in_flight: dict[tuple[str, int], Operation] = {}

    # Of messages that are submitted together PyTorch then begins each by itself.
    supports_coalescing = False

    @property
    def group_name(self) -> str:
        """By what meshes and compiled programs find it."""
        return self._names.name

    def getGroupName(self) -> str:  # noqa: N802
        """`group_name`."""
        return self._names.name

    def getBackendName(self) -> str:  # noqa: N802
        """`ronde`."""
        return "ronde"

    def name(self) -> str:
        """`ronde`."""
        return "ronde"

    def shutdown(self) -> None:
        """`torch.distributed.destroy_process_group` has been called."""
        self._leave(self, False)

    def abort(self) -> None:
        """`shutdown` that waits for nobody."""
        self._leave(self, True)

    def _get_backend(self, device: torch.device) -> Group:
        """Tensors of any device are this group's."""
        del device
        return self

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Operation:
        """Reduces a tensor where it lies."""
        (tensor,) = tensors
        start = partial(self._client.allreduce_async, tensor, _op(opts), out=tensor)
        return self._begin("allreduce", start, opts, [tensor])

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Operation:
        """Reduces several tensors where they lie."""
        tensors = list(tensors)
        start = partial(self._client.grouped_allreduce_async, tensors, _op(opts), out=tensors)
        return self._begin("allreduce", start, opts, tensors)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Operation:
        """Overwrites a tensor by the root's."""
        tensor, root = tensors[opts.rootTensor], self._rank_of(opts.rootRank)
        start = partial(self._client.broadcast_async, tensor, root, out=tensor)
        return self._begin("broadcast", start, opts, [tensor])

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Operation:
        """Overwrites the root's tensor by the reduction of all."""
        (tensor,) = tensors
        start = partial(self._client.reduce_async, tensor, self._rank_of(opts.rootRank), _op(opts))
        return self._begin("reduce", start, opts, [tensor], _copied_to([tensor]))

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Operation:
        """Fills a list by all ranks' tensors, which may differ in shape."""
        (tensor,), (places,) = inputs, outputs
        start = partial(self._client.allgather_async, tensor.reshape(-1))
        return self._begin("allgather", start, opts, places, _copied_to(places))

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Operation:
        """Fills a tensor by all ranks' tensors, one after the other."""
        start = partial(self._client.allgather_async, tensor.reshape(-1), out=_flat(output))
        return self._begin("allgather", start, opts, [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Operation:
        """`all_gather_single` of several tensors."""
        flat = [tensor.reshape(-1) for tensor in tensors]
        start = partial(self._client.grouped_allgather_async, flat)
        return self._begin("allgather", start, opts, outputs, _copied_one_by_one(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Operation:
        """Reduces the n-th tensors of all ranks' lists for rank n; all of one shape."""
        (output,), (parts,) = outputs, inputs
        return self.reduce_scatter_single(output, torch.stack([part.reshape(output.shape) for part in parts]), opts)

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Operation:
        """Reduces tensors of all ranks, each rank its part."""
        rows, row = tensor.reshape(self._members.size(), -1), _flat(output).view(1, -1)
        start = partial(self._client.reduce_scatter_async, rows, _op(opts), out=row)
        return self._begin("reducescatter", start, opts, [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Operation:
        """`reduce_scatter_single` of several tensors."""
        rows = [tensor.reshape(self._members.size(), -1) for tensor in tensors]
        start = partial(self._client.grouped_reduce_scatter_async, rows, _op(opts))
        return self._begin("reducescatter", start, opts, outputs, _copied_one_by_one(outputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> Operation:
        """Sends rows of a tensor to all ranks and fills another by the rows of all."""
        splits = list(input_splits) if input_splits else None
        start = partial(self._client.alltoall_async, tensor, splits, out=output)

        def finish(result: Any) -> list[torch.Tensor]:
            received = result[1].tolist() if splits else output_splits
            if output_splits and received != list(output_splits):
                raise ValueError(f"ranks sent {received} rows, not {list(output_splits)} as the output's splits say")
            return [output]

        return self._begin("alltoall", start, opts, [output], finish)

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> Operation:
        """Sends the n-th tensor to rank n and fills a list by what all ranks sent."""
        parts = [tensor.reshape(-1) for tensor in inputs]
        start = partial(self._client.alltoall_async, torch.cat(parts), [len(part) for part in parts])
        copied = _copied_to(outputs)
        return self._begin("alltoall", start, opts, outputs, lambda received: copied(received[0]))

    def gather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Operation:
        """Fills the root's list by all ranks' tensors."""
        (tensor,), places = inputs, outputs[0] if outputs else []
        start = partial(self._client.gather_async, tensor.reshape(-1), self._rank_of(opts.rootRank))
        return self._begin("gather", start, opts, places, _copied_to(places))

    def scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Operation:
        """Overwrites a tensor by that one of the root's list that is for this rank; all of one shape."""
        (output,) = outputs
        whole = torch.stack([part.reshape(output.shape) for part in inputs[0]]) if inputs else output
        start = partial(self._client.scatter_async, whole, self._rank_of(opts.rootRank))
        return self._begin("scatter", start, opts, [output], _copied_to([output]))

    def send(self, tensors: Sequence[torch.Tensor], to_rank: int, tag: int = 0) -> Operation:
        """Sends a tensor to another rank."""
        (tensor,) = tensors
        handle = self._client.send_async(tensor, self._rank_of(to_rank), tag, process_set=self._members)
        return self._message(handle, tensor, None)

    def recv(self, tensors: Sequence[torch.Tensor], from_rank: int, tag: int = 0) -> Operation:
        """Overwrites a tensor by what another rank sends."""
        (tensor,) = tensors
        handle = self._client.recv_async(self._rank_of(from_rank), tag, like=tensor, process_set=self._members)
        return self._message(handle, tensor, _copied_to([tensor]))

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Operation:
        """Not there: a receive names who sends."""
        raise NotImplementedError(f"the backend ronde has no receive from any rank (tag {tag}); give src=")

    def barrier(self, opts: Any = None) -> Operation:
        """Complete when all ranks have called it."""
        return self._begin("barrier", self._client.barrier_async, opts, [])

    def _begin(
        self,
        kind: str,
        start: Callable[..., Handle | GroupHandle],
        opts: Any,
        results: Sequence[torch.Tensor],
        finish: Callable[[Any], list[torch.Tensor]] | None = None,
    ) -> Operation:
        """Starts an operation under its kind and a number, as all ranks start those of a kind in the same order.

        Numbers come again, for what comes again in every step is soon not negotiated any more. What had the name before
        is complete then; all ranks have started that before this, so nobody waits there for this one.
        """
        number = self._count(kind) % NUMBERS
        earlier = self._in_flight.get((kind, number))
        if earlier is not None:
            earlier.await_end()
        handle = start(name=f"{self._names.label}.{kind}.{number}", process_set=self._members)
        given = getattr(opts, "timeout", None)
        timeout = given if given is not None and given > datetime.timedelta(0) else self._timeout
        return self._operation((kind, number), handle, finish or _are(results), timeout)

    def _message(
        self, handle: Handle, tensor: torch.Tensor, finish: Callable[[Any], list[torch.Tensor]] | None
    ) -> Operation:
        return self._operation(("message", self._count("message")), handle, finish or _are([tensor]), self._timeout)

    def _operation(
        self,
        key: tuple[str, int],
        handle: Handle | GroupHandle,
        finish: Callable[[Any], list[torch.Tensor]],
        timeout: datetime.timedelta,
    ) -> Operation:
        def ended() -> None:
            self._in_flight.pop(key, None)

        operation = self._in_flight[key] = Operation(handle, finish, timeout, self._completions, ended)
        return operation

    def _count(self, kind: str) -> int:
        """How many of a kind there were before."""
        number = self._started.get(kind, 0)
        self._started[kind] = number + 1
        return number

    def _rank_of(self, rank: int) -> int:
        """The rank in the job of one within the group."""
        return self._members.ranks[rank]


def _op(opts: Any) -> int:
    """ronde's operation for that of a call."""
    given = torch.distributed.ReduceOp.SUM if opts is None else opts.reduceOp
    for name, op in _OPS.items():
        if given == getattr(torch.distributed.ReduceOp, name):
            return op
    raise NotImplementedError(f"the backend ronde reduces by {', '.join(_OPS)}, not by {given}")


def _flat(output: torch.Tensor) -> torch.Tensor:
    """All elements in one dimension, where they lie."""
    if not output.is_contiguous():
        raise ValueError("the output of a collective on one tensor is contiguous; give a contiguous one")
    return output.view(-1)


def _are(results: Sequence[torch.Tensor]) -> Callable[[Any], list[torch.Tensor]]:
    """Of an operation whose results are read to where they belong."""
    kept = list(results)
    return lambda result: kept


def _copied_to(places: Sequence[torch.Tensor]) -> Callable[[Any], list[torch.Tensor]]:
    """Fills tensors by the elements of a result, one after the other; does nothing where this rank gets none."""

    def finish(result: torch.Tensor | None) -> list[torch.Tensor]:
        if result is None:
            return list(places)
        counts = [place.numel() for place in places]
        if sum(counts) != result.numel() or (places and places[0].dtype != result.dtype):
            raise ValueError(
                f"a result of {result.numel()} elements of {result.dtype} does not fit the tensors given for it, of "
                f"{sum(counts)} of {places[0].dtype}"
            )
        with torch.no_grad():
            for place, part in zip(places, result.reshape(-1).split(counts)):
                place.copy_(part.view(place.shape))
        return list(places)

    return finish


def _copied_one_by_one(places: Sequence[torch.Tensor]) -> Callable[[Any], list[torch.Tensor]]:
    """Fills each tensor by a result of its own."""

    def finish(results: list[torch.Tensor]) -> list[torch.Tensor]:
        return [_copied_to([place])(result)[0] for place, result in zip(places, results)]

    return finish
