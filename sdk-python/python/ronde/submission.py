"""How operations are submitted: arguments checked, tensors handed over, results read."""

from __future__ import annotations

import logging
import operator
from typing import TYPE_CHECKING, Any, Callable

import numpy

from ronde.call_site import call_site
from ronde.handle import GroupHandle, Handle, MessageHandle
from ronde.plugins import Plugin, PluginOp, call_of
from ronde.tensors import Source, check_target, kind_of, owns_memory, source_of, target_like, target_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ronde import _ronde
    from ronde.process_set import ProcessSet
    from ronde.tensors import Target


class Submission:
    """The base of a client: one way for all operations."""

    _session: _ronde.Session
    _sets: dict[int, ProcessSet]

    def completions(self) -> _ronde.Completions:
        """Counts operations submitted with `notify` that complete while no thread waits for them.

        For programs that wait for any of many operations. Raises why the session is over.
        """
        return self._session.completions()

    def log_notices(self) -> None:
        """Logs what the sidecar has to say to people, such as which rank is late. Waits do this by themselves."""
        for notice in self._session.take_notices():
            _log.warning("%s", notice)

    def _submit(
        self,
        kind: str,
        tensor: Any,
        name: str | None,
        process_set: ProcessSet | None,
        *,
        out: Target | None = None,
        read: Callable[[_ronde.Operation], Any] | None = None,
        **options: Any,
    ) -> Handle:
        """One operation on a tensor, which may be a source already; without a `read` its result is of the same kind."""
        source = tensor if isinstance(tensor, Source) else source_of(tensor)
        self._label(options, name, process_set)
        if "mapped" not in options:
            options["mapped"] = out is None and source.view is not None
        operation = self._session.submit(kind, source.dtype, source.shape, source.address, source.nbytes, **options)
        if read is None:
            # While it is in flight: nobody waits for that.
            is_small = source.nbytes < MAPPED_BYTES_MIN and kind in _LIKE_THE_INPUT
            place = source.empty(source.shape) if out is None and is_small else None
            read = read_tensor(source, out, place)
        return Handle(self.log_notices, operation, read)

    def reduce_gradient(
        self,
        gradient: torch.Tensor,
        op: int | PluginOp,
        name: str,
        prescale_factor: float,
        postscale_factor: float,
        process_set: ProcessSet | None = None,
        codec: Plugin | None = None,
    ) -> Handle:
        """An all-reduce of a gradient whose memory may be replaced by the result's, instead of being written."""
        source, target = source_of(gradient), target_of(gradient)
        view = source.view if owns_memory(gradient) else None

        def read(operation: _ronde.Operation) -> torch.Tensor:
            memory = None if view is None else operation.take_mapped()
            if view is None or memory is None:
                operation.read_into(target.address, target.nbytes)
                target.finish()
            else:
                gradient.data = view(memory, gradient.shape)
            return gradient

        options = reduction(op, prescale_factor, postscale_factor, codec)
        return self._submit("allreduce", source, name, process_set, read=read, mapped=view is not None, **options)

    def _submit_group(
        self,
        kind: str,
        tensors: Sequence[Any],
        name: str | None,
        process_set: ProcessSet | None,
        *,
        out: Sequence[Any] | None = None,
        reads: Sequence[Callable[[_ronde.Operation], Any]] | None = None,
        **options: Any,
    ) -> GroupHandle:
        """Operations on several tensors; without `reads` their results are of the same kind."""
        sources = [tensor if isinstance(tensor, Source) else source_of(tensor) for tensor in tensors]
        targets = _targets_like(out, sources)
        self._label(options, name, process_set)
        if not sources:
            return GroupHandle([])
        parts = [(source.dtype, source.shape, source.address, source.nbytes) for source in sources]
        if "mapped" not in options:
            options["mapped"] = out is None and all(source.view is not None for source in sources)
        operations = self._session.submit_group(kind, parts, **options)
        if reads is None:
            reads = [read_tensor(source, target) for source, target in zip(sources, targets)]
        return GroupHandle([Handle(self.log_notices, *each) for each in zip(operations, reads)])

    def _request(
        self,
        kind: str,
        read: Callable[[_ronde.Operation], Any],
        name: str | None = None,
        process_set: ProcessSet | None = None,
        **options: Any,
    ) -> Handle:
        """One operation to which this rank brings no tensor."""
        return Handle(self.log_notices, self._ask(kind, name, process_set, **options), read)

    def _receive(self, like: Any, process_set: ProcessSet | None, **options: Any) -> MessageHandle:
        """The receiving side of a message."""
        return MessageHandle(self.log_notices, self._ask("recv", None, process_set, **options), read_any(like))

    def _ask(self, kind: str, name: str | None, process_set: ProcessSet | None, **options: Any) -> _ronde.Operation:
        self._label(options, name, process_set)
        return self._session.submit(kind, None, (), 0, 0, **options)

    def _set(self, process_set: ProcessSet | None) -> ProcessSet:
        """The set, once it is known to be there with this rank in it."""
        if process_set is None:
            return self._sets[0]
        if process_set.id is None or self._sets.get(process_set.id) is not process_set:
            raise ValueError(
                f"Process set provided does not exist, or has not been registered. It is {process_set}; give one that "
                "add_process_set of this client has returned and remove_process_set has not removed."
            )
        if not process_set.included():
            rank = self._session.rank
            raise ValueError(f"Rank {rank} is not a member of the provided process set. It is {process_set}.")
        return process_set

    def _label(self, options: dict[str, Any], name: str | None, process_set: ProcessSet | None) -> None:
        """Adds what an operation is called, whose it is, and who asks for it."""
        if name is not None:
            options["name"] = name
        number = self._set(process_set).id
        if number:
            options["set"] = number
        options["site"] = call_site()

    def _for_root(self, root: int, source: Source) -> Callable[[_ronde.Operation], Any]:
        return read_tensor(source) if root == self._session.rank else read_nothing


def read_tensor(
    source: Source, out: Target | None = None, place: Target | None = None
) -> Callable[[_ronde.Operation], Any]:
    """Reads a result into `out`; without one it is a view of shared memory or new memory, of the input's kind.

    place -- new memory that has been made already, if the result is of its shape
    """
    empty, view = source.empty, source.view  # not the source, which keeps the input alive

    def read(operation: _ronde.Operation) -> Any:
        shape = operation.shape()
        if out is None and view is not None and (memory := operation.take_mapped()) is not None:
            return view(memory, shape)
        if out is not None:
            target = out
        else:
            target = place if place is not None and place.shape == tuple(shape) else empty(shape)
        if target.shape != tuple(shape):
            raise ValueError(f"out is of shape {target.shape}, but the result is of shape {tuple(shape)}")
        operation.read_into(target.address, target.nbytes)
        return target.finish()

    return read


def read_any(like: Any) -> Callable[[_ronde.Operation], Any]:
    """Reads a result of a type and shape that another rank chose."""
    kind = kind_of(like)

    def read(operation: _ronde.Operation) -> Any:
        target = kind(operation.dtype(), operation.shape())
        operation.read_into(target.address, target.nbytes)
        return target.finish()

    return read


def read_nothing(operation: _ronde.Operation) -> None:
    """Of an operation without a result on this rank."""
    operation.shape()  # raises why it failed


def _targets_like(out: Sequence[Any] | None, sources: Sequence[Source]) -> list[Target | None]:
    if out is None:
        return [None] * len(sources)
    if len(out) != len(sources):
        raise ValueError(f"out has {len(out)} places for the results of {len(sources)} tensors")
    return [target_like(place, source) for place, source in zip(out, sources)]


def target_of_rows(out: Any, source: Source, rows: int | None) -> Target | None:
    """The place for a result of other rows, if one is given; None for as many as only the other ranks know."""
    if out is None:
        return None
    target = target_of(out)
    known = target.shape[0] if rows is None and target.shape else rows
    return check_target(target, source, (known, *source.shape[1:]))


def share_of(rows: int, process_set: ProcessSet) -> int:
    """How many of the rows are this rank's when they are divided."""
    each, more = divmod(rows, process_set.size())
    return each + (process_set.rank() < more)


def splits_of(splits: Any) -> dict[str, Any]:
    """How many rows each rank gets; whether they fit the tensor and the ranks is the native client's to check."""
    if splits is None:
        return {}
    array = numpy.asarray(splits)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array < 0).any():
        raise ValueError(
            f"alltoall takes splits as 1-D integers, such as int32, that are 0 or more, one for each rank; not {splits}"
        )
    return {"splits": array.tolist()}


def reduction(
    op: int | PluginOp, prescale_factor: float, postscale_factor: float, codec: str | Plugin | None = None
) -> dict[str, Any]:
    """The options of a reduction. Raises ValueError for a codec where a reduction belongs and the other way round."""
    if isinstance(op, Plugin):
        raise ValueError(f"op={op} is a codec; give codec={op}, or ronde.PluginOp for a plugin that reduces")
    if isinstance(codec, PluginOp):
        raise ValueError(f"codec={codec} is a reduction; give op={codec}, or ronde.Plugin for a plugin that is a codec")
    options: dict[str, Any] = {"op": op, "prescale": prescale_factor, "postscale": postscale_factor}
    if isinstance(op, PluginOp):
        if codec is not None:
            raise ValueError(f"op={op} with codec={codec!r}: values reach a plugin as they are; leave the codec out")
        options.update(op=BY_PLUGIN, plugin=call_of(op))
    elif isinstance(codec, Plugin):
        options["plugin"] = call_of(codec)
    elif codec is not None:
        options["codec"] = codec
    return options


def rank_number(rank: Any) -> int:
    """What may be a rank."""
    try:
        number = operator.index(rank)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 32:
        raise ValueError(f"ranks are integers from 0, not {rank!r}")
    return number


def tag_number(tag: int) -> int:
    """What may be a tag."""
    if not 0 <= tag < 1 << 32:
        raise ValueError(f"tags are integers from 0 to 2^32 - 1, not {tag}")
    return tag


# Results of less are copied: the native client's limit.
MAPPED_BYTES_MIN = 64 << 10
# Whose result has the input's shape.
_LIKE_THE_INPUT = frozenset(("allreduce", "broadcast"))
# The native client's number of a reduction by a plugin.
BY_PLUGIN = 8

_log = logging.getLogger("ronde")
