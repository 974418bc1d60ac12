"""Collectives of a group: what its ranks submit, and where their results are written."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Callable, TypeVar, cast

import torch

from ronde.submission import read_nothing, read_tensor
from ronde.torch.distributed import reductions, sparse
from ronde.torch.distributed.base import GroupBase, begun
from ronde.torch.distributed.elements import as_elements, check_summed, fill, input_of, joined, read_into, resolved
from ronde.torch.distributed.uneven import dimension_of
from ronde.torch.distributed.work import Operation

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.tensors import Source
    from ronde.torch.distributed.elements import Read
    from ronde.torch.distributed.ranks import Start
    from ronde.torch.distributed.reductions import Reduction


_Method = TypeVar("_Method", bound=Callable[..., Operation])


def _refusing(kind: str) -> Callable[[_Method], _Method]:
    """Makes an error in one rank's arguments an error on all ranks: the others would wait for this one's operation.

    The rank whose arguments are wrong raises the error, after it has submitted a request that matches none of theirs.
    """

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Collectives, *arguments: Any, **options: Any) -> Operation:
            before = begun.count
            try:
                return method(self, *arguments, **options)
            except Exception as error:
                if begun.count == before:  # the operation has not begun
                    self._refuse(kind, error)
                raise

        return cast("_Method", call)

    return decorate


class Collectives(GroupBase):
    """Collectives of a group, with the names and arguments of PyTorch's `Backend`. Ranks are those within the group.

    Some methods have a second name, because PyTorch 2.15 renamed them.
    """

    @_refusing("allreduce")
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

    @_refusing("allreduce")
    def allreduce_coalesced(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Operation:
        """Reduces several tensors in place."""
        reduction = reductions.of(opts)
        sources = [_summed(tensor, reduction) for tensor in tensors]
        reads = [read_into(tensor, source=source) for tensor, source in zip(tensors, sources)]
        start = self._ranks.group("allreduce", sources, reads, **reduction.options)
        return self._begin("allreduce", start, opts, tensors)

    @_refusing("broadcast")
    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Operation:
        """Overwrites a tensor with the root's. The root's own stays unchanged."""
        tensor, root = tensors[opts.rootTensor], opts.rootRank
        source = input_of(tensor)
        read = read_nothing if root == self._ranks.me else read_into(tensor, f"rank {root}", source)
        start = self._ranks.tensor("broadcast", source, read, root=self._ranks.in_job(root))
        return self._begin("broadcast", start, opts, [tensor])

    @_refusing("reduce")
    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> Operation:
        """Overwrites the root's tensor with the reduction of all ranks' tensors."""
        (tensor,), reduction = tensors, reductions.of(opts)
        read = read_into(tensor) if opts.rootRank == self._ranks.me else read_nothing
        root = self._ranks.in_job(opts.rootRank)
        start = self._ranks.tensor("reduce", _summed(tensor, reduction), read, root=root, **reduction.options)
        return self._begin("reduce", start, opts, [tensor])

    @_refusing("allgather")
    def allgather(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Operation:
        """Fills a list with all ranks' tensors, whose sizes may differ as those of the list do."""
        (tensor,), (places,) = inputs, outputs
        if len(places) != self._ranks.size:
            raise ValueError(
                f"all_gather takes an output tensor for each of {self._ranks.size} ranks, not {len(places)}"
            )
        sorted_places = self._ranks.in_set_order(places)
        start = self._gathering_list(tensor, [place.numel() for place in sorted_places])
        return self._begin("allgather", start, opts, places, lambda whole: fill(sorted_places, whole))

    def _gathering_list(self, tensor: torch.Tensor, sizes: list[int]) -> Start:
        """Gathers elements, as many from each rank as all lists agree on. Tensors of equal size are sent as rows."""
        if len(set(sizes)) <= 1:
            source = _row(tensor)
            return self._ranks.tensor("allgather", source, read_tensor(source), mapped=True)
        source, dimension = input_of(tensor), dimension_of(sizes)
        if sizes[self._ranks.position] != tensor.numel():
            dimension += 1 + self._ranks.position  # differs on each rank, so all ranks get an error
        check = self._ranks.tensor("allgather", _nothing(tensor, 0, dimension), read_nothing)
        data = self._ranks.tensor("allgather", source, read_tensor(source), mapped=True)
        return self._ranks.checked(sizes, check, data)

    @_refusing("allgather")
    def allgather_coalesced(
        self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> Operation:
        """Gathers several tensors: a list of tensors for each rank."""
        rows = [_row(tensor) for tensor in inputs]
        start = self._ranks.group("allgather", rows, [read_tensor(row) for row in rows], mapped=True)

        def finish(results: list[torch.Tensor]) -> None:
            _check_lists(outputs, self._ranks.size, len(inputs))
            for index, result in enumerate(results):
                fill(self._ranks.in_set_order([places[index] for places in outputs]), result)

        return self._begin("allgather", start, opts, [place for places in outputs for place in places], finish)

    @_refusing("allgather")
    def all_gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Operation:
        """Fills a tensor with all ranks' tensors, concatenated."""
        row = _row(tensor)
        if self._ranks.is_sorted:
            return self._begin("allgather", self._ranks.tensor("allgather", row, read_into(output)), opts, [output])
        start = self._ranks.tensor("allgather", row, read_tensor(row), mapped=True)
        return self._begin("allgather", start, opts, [output], lambda whole: self._fill_in_order(output, whole))

    def _fill_in_order(self, output: torch.Tensor, whole: torch.Tensor) -> None:
        """Fills a tensor with what all ranks have sent, in the order of the group."""
        fill([output], self._ranks.rows_in_order(whole))

    _allgather_base = all_gather_single

    @_refusing("allgather")
    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Operation:
        """`all_gather_single` of several tensors."""
        rows = [_row(tensor) for tensor in tensors]
        if self._ranks.is_sorted:
            start = self._ranks.group("allgather", rows, [read_into(output) for output in outputs])
            return self._begin("allgather", start, opts, outputs)
        start = self._ranks.group("allgather", rows, [read_tensor(row) for row in rows], mapped=True)

        def finish(results: list[torch.Tensor]) -> None:
            for output, whole in zip(outputs, results):
                self._fill_in_order(output, whole)

        return self._begin("allgather", start, opts, outputs, finish)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_refusing("reducescatter")
    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[Sequence[torch.Tensor]], opts: Any = None
    ) -> Operation:
        """Reduces the n-th tensors of all ranks' lists for rank n."""
        (output,), (parts,) = outputs, inputs
        reduction, sizes = reductions.of(opts), [part.numel() for part in parts]
        check_summed(output, reduction.is_sum)
        if len(sizes) != self._ranks.size:
            raise ValueError(f"reduce_scatter takes a tensor for each of {self._ranks.size} ranks, not {len(sizes)}")
        if any(part.dtype != output.dtype for part in parts):
            raise ValueError(f"the tensors of a list are of one type, {output.dtype}")
        parts = self._ranks.in_set_order(parts)
        sizes = [part.numel() for part in parts]
        if len(set(sizes)) > 1:
            start, finish = self._scattering_uneven(output, parts, sizes, reduction)
            return self._begin("reducescatter", start, opts, [output], finish)
        return self._scatter_rows(output, torch.cat([part.detach().reshape(-1) for part in parts]), opts)

    def _scattering_uneven(
        self, output: torch.Tensor, parts: Sequence[torch.Tensor], sizes: list[int], reduction: Reduction
    ) -> tuple[Start, Callable[[Any], None]]:
        """Sends each rank all contributions to its part, which it reduces locally."""
        whole, dimension = joined(parts), dimension_of(sizes)
        if sizes[self._ranks.position] != output.numel():
            dimension += 1 + self._ranks.position  # differs on each rank, so all ranks get an error
        nothing = _nothing(output, self._ranks.size, 0, dimension)
        check = self._ranks.tensor("reducescatter", nothing, read_nothing, **reduction.options)
        source = input_of(whole)
        splits = [len(whole) // max(1, sum(sizes)) * size for size in sizes]
        data = self._ranks.tensor("alltoall", source, read_tensor(source), mapped=True, splits=splits)

        def finish(received: torch.Tensor) -> None:
            fill([output], reduction.of_rows(received.view(self._ranks.size, -1)))

        return self._ranks.checked(sizes, check, data), finish

    @_refusing("reducescatter")
    def reduce_scatter_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Operation:
        """Reduces the tensors of all ranks. Each rank gets its part."""
        return self._scatter_rows(output, self._in_set_order(tensor), opts)

    def _in_set_order(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a tensor with as many elements for each rank, in the order of the process set."""
        size = self._ranks.size
        if self._ranks.is_sorted or tensor.numel() % size or not tensor.numel():
            return tensor  # what cannot be divided is an error later
        parts = tensor.detach().reshape(-1).split(tensor.numel() // size)
        return torch.cat(list(self._ranks.in_set_order(parts)))

    def _scatter_rows(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any) -> Operation:
        """Reduces the tensors of all ranks. Each rank gets a part, in the order of the process set."""
        reduction = reductions.of(opts)
        start = self._ranks.tensor(
            "reducescatter", self._rows(tensor, reduction), read_into(output), **reduction.options
        )
        return self._begin("reducescatter", start, opts, [output])

    _reduce_scatter_base = reduce_scatter_single

    @_refusing("reducescatter")
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], opts: Any = None
    ) -> Operation:
        """`reduce_scatter_single` of several tensors."""
        reduction = reductions.of(opts)
        rows = [self._rows(self._in_set_order(tensor), reduction) for tensor in tensors]
        reads = [read_into(output) for output in outputs]
        return self._begin(
            "reducescatter", self._ranks.group("reducescatter", rows, reads, **reduction.options), opts, outputs
        )

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _rows(self, tensor: torch.Tensor, reduction: Reduction) -> Source:
        """Returns a tensor as a source with a row for each rank."""
        source, size = _summed(tensor, reduction), self._ranks.size
        if source.shape[0] % size:
            raise ValueError(
                f"an input of {tensor.numel()} elements cannot be divided by {size} ranks; give one that can"
            )
        source.shape = (size, source.shape[0] // size)
        return source

    @_refusing("alltoall")
    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int] | None,
        input_splits: Sequence[int] | None,
        opts: Any = None,
    ) -> Operation:
        """Sends rows of a tensor to all ranks and fills another with the rows from all ranks."""
        sent = _elements_of_splits(tensor, input_splits, self._ranks.size, "input")
        wanted = _elements_of_splits(output, output_splits, self._ranks.size, "output")
        if self._ranks.is_sorted:
            start = self._ranks.tensor("alltoall", input_of(tensor), _read_splits(output, wanted), splits=sent)
            return self._begin("alltoall", start, opts, [output])
        inputs = as_elements(resolved(tensor)).reshape(-1).split(sent)
        parts = as_elements(output).new_empty(sum(wanted)).split(wanted)
        start = self._exchanging(parts, inputs)

        def finish(received: torch.Tensor) -> None:
            fill(self._ranks.in_set_order(parts), received)
            fill([output], torch.cat(parts))

        return self._begin("alltoall", start, opts, [output], finish)

    alltoall_base = all_to_all_single

    @_refusing("alltoall")
    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> Operation:
        """Sends the n-th tensor to rank n and fills a list with the tensors from all ranks."""
        for what, tensors in [("output", outputs), ("input", inputs)]:
            if len(tensors) != self._ranks.size:
                count, size = len(tensors), self._ranks.size
                raise ValueError(f"all_to_all takes an {what} tensor for each of {size} ranks, not {count}")
        start, places = self._exchanging(outputs, inputs), self._ranks.in_set_order(outputs)
        return self._begin("alltoall", start, opts, outputs, lambda received: fill(places, received))

    def _exchanging(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Start:
        """Sends tensors to all ranks. The sizes of `outputs` are what this rank takes from each."""
        outputs, inputs = self._ranks.in_set_order(outputs), self._ranks.in_set_order(inputs)
        whole = joined(inputs)
        pairs = [2 if tensor.is_complex() else 1 for tensor in (inputs[0], outputs[0])]
        source, splits = input_of(whole), [tensor.numel() * pairs[0] for tensor in inputs]
        wanted, read_whole = [tensor.numel() * pairs[1] for tensor in outputs], read_tensor(source)

        def read(operation: Any) -> torch.Tensor:
            _check_received(operation.splits(), wanted)
            result: torch.Tensor = read_whole(operation)
            return result

        return self._ranks.tensor("alltoall", source, read, mapped=True, splits=splits)

    @_refusing("gather")
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
            fill(self._ranks.in_set_order(places), whole)

        return self._begin("gather", start, opts, places, finish)

    @_refusing("gather")
    def gather_single(self, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None) -> Operation:
        """Fills the root's tensor with all ranks' tensors, concatenated."""
        row, root, is_root = _row(tensor), self._ranks.in_job(opts.rootRank), opts.rootRank == self._ranks.me
        if self._ranks.is_sorted or not is_root:
            start = self._ranks.tensor("gather", row, read_into(output) if is_root else read_nothing, root=root)
            return self._begin("gather", start, opts, [output])
        start = self._ranks.tensor("gather", row, read_tensor(row), mapped=True, root=root)
        return self._begin("gather", start, opts, [output], lambda whole: self._fill_in_order(output, whole))

    gather_into_tensor = gather_single

    @_refusing("scatter")
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
            raise ValueError(text)
        whole = joined(self._ranks.in_set_order(parts))
        source = input_of(whole, size, len(whole) // size)
        return self._begin("scatter", self._ranks.tensor("scatter", source, read, root=root), opts, [output])


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
