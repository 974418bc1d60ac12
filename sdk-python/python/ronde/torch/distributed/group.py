"""Groups of `torch.distributed` whose collectives ronde performs."""

from __future__ import annotations

import datetime
import math
from typing import TYPE_CHECKING, Any, Callable, NoReturn, Optional, cast

import torch
import torch.distributed

from ronde.submission import read_nothing, read_tensor
from ronde.torch.distributed import hooks, reductions, sparse
from ronde.torch.distributed.elements import check_summed, fill, input_of, joined, read_into
from ronde.torch.distributed.monitored import monitored_barrier
from ronde.torch.distributed.progress import IN_FLIGHT_MAX, Lane
from ronde.torch.distributed.uneven import Checked, dimension_of
from ronde.torch.distributed.work import Call, InFlight, Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.client import Client
    from ronde.process_set import ProcessSet
    from ronde.tensors import Source
    from ronde.torch.distributed.elements import Read
    from ronde.torch.distributed.progress import Completer
    from ronde.torch.distributed.reductions import Reduction

# Untyped, because it has more overloads of each method than PyTorch's functions call.
_ProcessGroup: Any = torch.distributed.ProcessGroup
# Submits an operation under a name, if one is given.
Start = Callable[[Optional[str], bool], InFlight]


class Ranks:
    """The ranks of a group as a process set, and functions that submit its operations.

    A `start` takes a name, and whether to count the completion if no thread waits for it, and submits an operation.
    """

    def __init__(self, client: Client, members: ProcessSet) -> None:
        self.client = client
        self.members = members
        self.size = members.size()
        self.me = members.rank()

    def in_job(self, rank: int) -> int:
        """Returns the job's rank of a rank in the group. Raises ValueError for one that the group does not have."""
        if not 0 <= rank < self.size:
            raise ValueError(f"invalid rank {rank}: the group has ranks 0 to {self.size - 1}")
        return self.members.ranks[rank]

    def tensor(self, kind: str, source: Source, read: Read, mapped: bool = False, **options: Any) -> Start:
        """Returns the start of an operation on a tensor.

        mapped -- whether the result may stay in shared memory, which `read` must support
        """
        members = self.members

        def start(name: str | None, notify: bool) -> InFlight:
            return self.client._submit(kind, source, name, members, read=read, notify=notify, mapped=mapped, **options)

        return start

    def group(
        self, kind: str, sources: Sequence[Source], reads: Sequence[Read], mapped: bool = False, **options: Any
    ) -> Start:
        """Returns the start of an operation on several tensors."""
        members, options = self.members, {**options, "mapped": mapped}

        def start(name: str | None, notify: bool) -> InFlight:
            return self.client._submit_group(kind, sources, name, members, reads=reads, notify=notify, **options)

        return start

    def request(self, kind: str, read: Read, **options: Any) -> Start:
        """Returns the start of an operation to which this rank contributes no tensor."""
        members = self.members
        return lambda name, notify: self.client._request(kind, read, name, members, notify=notify, **options)

    def message(self, kind: str, source: Source | None, read: Read, rank: int, tag: int) -> Start:
        """Returns the start of a message to or from another rank, which has no name."""
        client, options = self.client, cast("dict[str, Any]", {"root": self.in_job(rank), "tag": tag, "notify": True})
        if source is None:
            return lambda name, notify: client._request(kind, read, None, self.members, **options)
        return lambda name, notify: client._submit(kind, source, None, self.members, read=read, mapped=False, **options)

    def checked(self, agreed: Any, check: Start, data: Start) -> Start:
        """Returns the start of two operations, the first of which fails if `agreed` differs between ranks."""
        number = dimension_of(agreed)

        def start(name: str | None, notify: bool) -> InFlight:
            return Checked(check(name, notify), data(f"{name}.{number:x}", notify))

        return start


class Group(_ProcessGroup):  # type: ignore[misc]
    """A process group of `torch.distributed` over a process set.

    Ranks here are those within the group.

    It is a whole group and not a backend of one: PyTorch calls a group made in Python directly, and passes its
    operations to the program unchanged. Some methods have a second name, because PyTorch 2.15 renamed them.

    name    -- PyTorch's name of the group
    label   -- a part of the names of its operations, unique among the groups of the same ranks
    timeout -- after which an operation is given up
    leave   -- called at the shutdown; its second argument is true if it must not wait for other ranks
    """

    def __init__(
        self,
        ranks: Ranks,
        name: str,
        label: str,
        timeout: datetime.timedelta,
        completer: Completer,
        leave: Callable[[Group, bool], None],
    ) -> None:
        super().__init__(ranks.me, ranks.size)
        self._ranks, self._name, self._label = ranks, name, label
        self._timeout, self._leave = timeout, leave
        self._completer = completer
        self._lane = Lane(completer)
        self._started: dict[str, int] = {}

    # Of messages that are submitted together PyTorch then begins each by itself.
    supports_coalescing = False

    @property
    def group_name(self) -> str:
        """The name under which meshes and compiled programs find the group."""
        return self._name

    def getGroupName(self) -> str:  # noqa: N802
        """Returns `group_name`."""
        return self._name

    def getBackendName(self) -> str:  # noqa: N802
        """Returns `ronde`."""
        return "ronde"

    def name(self) -> str:
        """Returns `ronde`."""
        return "ronde"

    @property
    def _device_types(self) -> list[torch.device]:
        # While PyTorch makes a group, it looks for backends of it where there are devices.
        is_made = self in torch.distributed.distributed_c10d._world.pg_map
        return [torch.device("cpu"), torch.device("cuda")] if is_made else []

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Sets the timeout of later operations."""
        self._timeout = timeout

    def shutdown(self) -> None:
        """Shuts the group down, for `torch.distributed.destroy_process_group`."""
        self._leave(self, False)

    def abort(self) -> None:
        """Shuts the group down without waiting for other ranks."""
        self._leave(self, True)

    def _get_backend(self, device: torch.device) -> Group:
        """Returns this group for tensors of any device."""
        del device
        return self

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Operation:
        """Reduces a dense or sparse tensor in place."""
        (tensor,) = tensors
        reduction = reductions.of(opts)
        if tensor.layout == torch.sparse_coo:
            start, finish = sparse.allreduce(self._ranks, tensor, reduction)
            return self._begin("allreduce", start, opts, [tensor], finish)
        source = _summed(tensor, reduction)
        read = read_into(tensor, source=source)
        start = self._ranks.tensor("allreduce", source, read, **reduction.options)
        return self._begin("allreduce", start, opts, [tensor])

    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Operation:
        """Reduces several tensors in place."""
        reduction = reductions.of(opts)
        sources = [_summed(tensor, reduction) for tensor in tensors]
        reads = [read_into(tensor, source=source) for tensor, source in zip(tensors, sources)]
        start = self._ranks.group("allreduce", sources, reads, **reduction.options)
        return self._begin("allreduce", start, opts, tensors)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Operation:
        """Overwrites a tensor with the root's. The root's own stays unchanged."""
        tensor, root = tensors[opts.rootTensor], opts.rootRank
        source = input_of(tensor)
        read = read_nothing if root == self._ranks.me else read_into(tensor, f"rank {root}", source)
        start = self._ranks.tensor("broadcast", source, read, root=self._ranks.in_job(root))
        return self._begin("broadcast", start, opts, [tensor])

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Operation:
        """Overwrites the root's tensor with the reduction of all ranks' tensors."""
        (tensor,), reduction = tensors, reductions.of(opts)
        read = read_into(tensor) if opts.rootRank == self._ranks.me else read_nothing
        root = self._ranks.in_job(opts.rootRank)
        start = self._ranks.tensor("reduce", _summed(tensor, reduction), read, root=root, **reduction.options)
        return self._begin("reduce", start, opts, [tensor])

    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Operation:
        """Fills a list with all ranks' tensors, whose sizes may differ as those of the list do."""
        (tensor,), (places,) = inputs, outputs
        if len(places) != self._ranks.size:
            text = f"all_gather takes an output tensor for each of {self._ranks.size} ranks, not {len(places)}"
            self._refuse("allgather", ValueError(text))
        start = self._gathering_list(tensor, [place.numel() for place in places])
        return self._begin("allgather", start, opts, places, lambda whole: fill(places, whole))

    def _gathering_list(self, tensor: torch.Tensor, sizes: list[int]) -> Start:
        """Gathers elements, as many from each rank as all lists agree on. Tensors of equal size are sent as rows."""
        if len(set(sizes)) <= 1:
            source = _row(tensor)
            return self._ranks.tensor("allgather", source, read_tensor(source), mapped=True)
        source, dimension = input_of(tensor), dimension_of(sizes)
        if sizes[self._ranks.me : self._ranks.me + 1] != [tensor.numel()]:
            dimension += 1 + self._ranks.me  # differs on each rank, so all ranks get an error
        check = self._ranks.tensor("allgather", _nothing(tensor, 0, dimension), read_nothing)
        data = self._ranks.tensor("allgather", source, read_tensor(source), mapped=True)
        return self._ranks.checked(sizes, check, data)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Operation:
        """Gathers several tensors: a list of tensors for each rank."""
        rows = [_row(tensor) for tensor in inputs]
        start = self._ranks.group("allgather", rows, [read_tensor(row) for row in rows], mapped=True)

        def finish(results: list[torch.Tensor]) -> None:
            _check_lists(outputs, self._ranks.size, len(inputs))
            for index, result in enumerate(results):
                fill([places[index] for places in outputs], result)

        return self._begin("allgather", start, opts, [place for places in outputs for place in places], finish)

    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Operation:
        """Fills a tensor with all ranks' tensors, concatenated."""
        start = self._ranks.tensor("allgather", _row(tensor), read_into(output))
        return self._begin("allgather", start, opts, [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Operation:
        """`all_gather_single` of several tensors."""
        reads = [read_into(output) for output in outputs]
        start = self._ranks.group("allgather", [_row(tensor) for tensor in tensors], reads)
        return self._begin("allgather", start, opts, outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Operation:
        """Reduces the n-th tensors of all ranks' lists for rank n."""
        (output,), (parts,) = outputs, inputs
        reduction, sizes = reductions.of(opts), [part.numel() for part in parts]
        check_summed(output, reduction.is_sum)
        if len(sizes) != self._ranks.size:
            text = f"reduce_scatter takes a tensor for each of {self._ranks.size} ranks, not {len(sizes)}"
            self._refuse("reducescatter", ValueError(text))
        if len(set(sizes)) > 1:
            start, finish = self._scattering_uneven(output, parts, sizes, reduction)
            return self._begin("reducescatter", start, opts, [output], finish)
        return self.reduce_scatter_single(output, _whole(parts, output.dtype), opts)

    def _scattering_uneven(
        self, output: torch.Tensor, parts: Sequence[torch.Tensor], sizes: list[int], reduction: Reduction
    ) -> tuple[Start, Callable[[Any], None]]:
        """Sends each rank all contributions to its part, which it reduces locally."""
        whole, dimension = joined(parts), dimension_of(sizes)
        if sizes[self._ranks.me] != output.numel():
            dimension += 1 + self._ranks.me  # differs on each rank, so all ranks get an error
        nothing = _nothing(output, self._ranks.size, 0, dimension)
        check = self._ranks.tensor("reducescatter", nothing, read_nothing, **reduction.options)
        source = input_of(whole)
        splits = [len(whole) // max(1, sum(sizes)) * size for size in sizes]
        data = self._ranks.tensor("alltoall", source, read_tensor(source), mapped=True, splits=splits)

        def finish(received: torch.Tensor) -> None:
            fill([output], reduction.of_rows(received.view(self._ranks.size, -1)))

        return self._ranks.checked(sizes, check, data), finish

    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Operation:
        """Reduces the tensors of all ranks. Each rank gets its part."""
        reduction = reductions.of(opts)
        start = self._ranks.tensor(
            "reducescatter", self._rows(tensor, reduction), read_into(output), **reduction.options
        )
        return self._begin("reducescatter", start, opts, [output])

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Operation:
        """`reduce_scatter_single` of several tensors."""
        reduction = reductions.of(opts)
        rows, reads = [self._rows(tensor, reduction) for tensor in tensors], [read_into(output) for output in outputs]
        return self._begin(
            "reducescatter", self._ranks.group("reducescatter", rows, reads, **reduction.options), opts, outputs
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _rows(self, tensor: torch.Tensor, reduction: Reduction) -> Source:
        """Returns a tensor as a source with a row for each rank."""
        source, size = _summed(tensor, reduction), self._ranks.size
        if source.shape[0] % size:
            text = f"an input of {tensor.numel()} elements cannot be divided by {size} ranks; give one that can"
            self._refuse("reducescatter", ValueError(text))
        source.shape = (size, source.shape[0] // size)
        return source

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> Operation:
        """Sends rows of a tensor to all ranks and fills another with the rows from all ranks."""
        try:
            sent = _elements_of_splits(tensor, input_splits, self._ranks.size, "input")
            wanted = _elements_of_splits(output, output_splits, self._ranks.size, "output")
        except ValueError as error:
            self._refuse("alltoall", error)
        start = self._ranks.tensor("alltoall", input_of(tensor), _read_splits(output, wanted), splits=sent)
        return self._begin("alltoall", start, opts, [output])

    alltoall_base = all_to_all_single

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> Operation:
        """Sends the n-th tensor to rank n and fills a list with the tensors from all ranks."""
        for what, tensors in [("output", outputs), ("input", inputs)]:
            if len(tensors) != self._ranks.size:
                count, size = len(tensors), self._ranks.size
                text = f"all_to_all takes an {what} tensor for each of {size} ranks, not {count}"
                self._refuse("alltoall", ValueError(text))
        whole = joined(inputs)
        pairs = [2 if tensor.is_complex() else 1 for tensor in (inputs[0], outputs[0])]
        source, splits = input_of(whole), [tensor.numel() * pairs[0] for tensor in inputs]
        wanted, read_whole = [tensor.numel() * pairs[1] for tensor in outputs], read_tensor(source)

        def read(operation: Any) -> torch.Tensor:
            _check_received(operation.splits(), wanted)
            result: torch.Tensor = read_whole(operation)
            return result

        start = self._ranks.tensor("alltoall", source, read, mapped=True, splits=splits)
        return self._begin("alltoall", start, opts, outputs, lambda received: fill(outputs, received))

    def gather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Operation:
        """Fills the root's list with all ranks' tensors, all of one size."""
        (tensor,), places, row = inputs, outputs[0] if outputs else [], _row(inputs[0])
        is_root = opts.rootRank == self._ranks.me
        read, root = read_tensor(row) if is_root else read_nothing, self._ranks.in_job(opts.rootRank)
        start = self._ranks.tensor("gather", row, read, mapped=is_root, root=root)

        def finish(whole: torch.Tensor | None) -> None:
            if whole is None:
                return
            if any(place.numel() != tensor.numel() for place in places):
                sizes = [place.numel() for place in places]
                raise ValueError(f"ranks sent {tensor.numel()} elements each, and the tensors for them have {sizes}")
            fill(places, whole)

        return self._begin("gather", start, opts, places, finish)

    def gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Operation:
        """Fills the root's tensor with all ranks' tensors, concatenated."""
        read = read_into(output) if opts.rootRank == self._ranks.me else read_nothing
        start = self._ranks.tensor("gather", _row(tensor), read, root=self._ranks.in_job(opts.rootRank))
        return self._begin("gather", start, opts, [output])

    gather_into_tensor = gather_single

    def scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Operation:
        """Overwrites a tensor with this rank's entry of the root's list; all entries are of one size."""
        (output,), root = outputs, self._ranks.in_job(opts.rootRank)
        read = read_into(output, f"rank {opts.rootRank}")
        if opts.rootRank != self._ranks.me:
            return self._begin("scatter", self._ranks.request("scatter", read, root=root), opts, [output])
        (parts,), size = inputs, self._ranks.size
        if len(parts) != size or len({part.numel() for part in parts}) > 1:
            sizes = [part.numel() for part in parts]
            text = f"scatter takes tensors of one size for each of {size} ranks, not of {sizes} elements"
            self._refuse("scatter", ValueError(text), root=root)
        whole = joined(parts)
        source = input_of(whole, size, len(whole) // size)
        return self._begin("scatter", self._ranks.tensor("scatter", source, read, root=root), opts, [output])

    def send(
        self, tensors: Sequence[torch.Tensor], to_rank: int, tag: int = 0, timeout: datetime.timedelta | None = None
    ) -> Operation:
        """Sends a tensor to another rank."""
        (tensor,) = tensors
        start = self._ranks.message("send", input_of(tensor), read_nothing, to_rank, tag)
        return self._message(f"send to rank {to_rank}", start, tensor, timeout)

    def recv(
        self, tensors: Sequence[torch.Tensor], from_rank: int, tag: int = 0, timeout: datetime.timedelta | None = None
    ) -> Operation:
        """Overwrites a tensor with one that another rank sends."""
        (tensor,) = tensors
        start = self._ranks.message("recv", None, read_into(tensor, f"rank {from_rank}"), from_rank, tag)
        return self._message(f"receive from rank {from_rank}", start, tensor, timeout)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> Operation:
        """Overwrites a tensor with the first one that any other rank sends."""
        (tensor,), members = tensors, self._ranks.members
        read_message = read_into(tensor)

        def read(operation: Any) -> int:
            source = members.ranks.index(operation.source())
            read_message(operation)
            return source

        start = self._ranks.request("recv", read, any_source=True, tag=tag)
        return self._message("receive from any rank", start, tensor, None)

    def barrier(self, opts: Any = None) -> Operation:
        """Completes when all ranks have called it, together with all earlier operations of this rank."""
        return self._begin("barrier", self._ranks.request("barrier", read_nothing), opts, [])

    def monitored_barrier(self, timeout: datetime.timedelta, wait_all_ranks: bool = False) -> None:
        """A barrier whose RuntimeError after the timeout names the missing ranks."""
        monitored_barrier(self, timeout, wait_all_ranks)

    def _refuse(self, kind: str, error: Exception, **options: Any) -> NoReturn:
        """Raises an error in this rank's arguments, after failing the operation on the other ranks.

        It submits a request that matches none of theirs, so they get an error and do not wait.
        """
        nothing = input_of(torch.empty(0, dtype=torch.uint8), self._ranks.size, 0, 0, 0, 0, 0)
        self._begin(kind, self._ranks.tensor(kind, nothing, read_nothing, **options), None, [])
        raise error

    def _begin(
        self,
        kind: str,
        start: Start,
        opts: Any,
        results: Sequence[torch.Tensor],
        finish: Callable[[Any], None] | None = None,
    ) -> Operation:
        """Starts an operation. Its name is its kind and a number: all ranks start those of a kind in the same order.

        Calls of a hook have a number within the hook instead, and a separate lane, as the module `hooks` explains.

        Numbers are reused, because requests that repeat are soon not negotiated any more. The previous operation of a
        name is complete by then: the lane submits at most as many at once as there are numbers.
        """
        calls = hooks.current()
        if calls is None:
            lane, number = self._lane, self._started.get(kind, 0)
            self._started[kind] = number + 1
            name = f"{self._label}.{kind}.{number % IN_FLIGHT_MAX}"
        else:
            lane, name = calls.lane, f"{self._label}.{calls.label}.{kind}.{calls.next()}"
        kept = list(results)

        def finished(result: Any) -> list[torch.Tensor]:
            if finish is not None:
                finish(result)
            return kept

        nbytes = sum(tensor.nbytes for tensor in kept if tensor.layout == torch.strided)
        given = getattr(opts, "timeout", None)
        timeout = given if given is not None and given > datetime.timedelta(0) else self._timeout
        call = Call(name, nbytes, lambda notify: start(name, notify), finished)
        operation = Operation(lane, call, timeout)
        lane.add(operation, getattr(opts, "asyncOp", True))
        return operation

    def _message(self, name: str, start: Start, tensor: torch.Tensor, timeout: datetime.timedelta | None) -> Operation:
        """Starts a message. Messages complete in any order, each in a separate lane."""
        lane = Lane(self._completer)
        operation: Operation

        def finish(source: int | None) -> list[torch.Tensor]:
            operation.source = source
            return [tensor]

        call = Call(name, tensor.nbytes, lambda notify: start(None, notify), finish)
        operation = Operation(lane, call, timeout or self._timeout)
        lane.add(operation, True)
        return operation


def _summed(tensor: torch.Tensor, reduction: Reduction) -> Source:
    """Returns a tensor as the input of a reduction."""
    check_summed(tensor, reduction.is_sum)
    return input_of(tensor)


def _row(tensor: torch.Tensor) -> Source:
    """Returns a tensor as one row, whose length must be the same on all ranks."""
    source = input_of(tensor)
    source.shape = (1, *source.shape)
    return source


def _nothing(like: torch.Tensor, *shape: int) -> Source:
    """Returns an input without elements."""
    return input_of(like.new_empty(0), *shape)


def _whole(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Concatenates tensors of one size."""
    if any(part.dtype != dtype for part in parts):
        raise ValueError(f"the tensors of a list are of one type, {dtype}")
    return torch.cat([part.detach().reshape(-1) for part in parts])


def _elements_of_splits(tensor: torch.Tensor, splits: Sequence[int] | None, size: int, what: str) -> list[int]:
    """Returns how many elements of a tensor go to, or come from, each rank. Splits are rows."""
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if tensor.numel() and (not tensor.dim() or rows % size):
            raise ValueError(f"the {rows} rows of the {what} cannot be divided by {size} ranks; give splits")
        splits = [rows // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise ValueError(
            f"the splits of the {what}, {list(splits)}, do not divide its {rows} rows between {size} ranks"
        )
    row = math.prod(tensor.shape[1:]) * (2 if tensor.is_complex() else 1)
    return [split * row for split in splits]


def _check_received(received: Sequence[int], wanted: Sequence[int]) -> None:
    if list(received) != list(wanted):
        raise ValueError(f"ranks sent {list(received)} elements, where the output takes {list(wanted)}")


def _read_splits(output: torch.Tensor, wanted: list[int]) -> Read:
    read = read_into(output)

    def checked(operation: Any) -> None:
        _check_received(operation.splits(), wanted)
        read(operation)

    return checked


def _check_lists(outputs: Sequence[Sequence[torch.Tensor]], size: int, count: int) -> None:
    lengths = [len(places) for places in outputs]
    if lengths != [count] * size:
        raise ValueError(
            f"all_gather_coalesced of {count} tensors takes as many outputs for each of {size} ranks, not {lengths}"
        )
