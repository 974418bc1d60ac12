"""Submits operations: checks arguments, passes tensors to the native client, reads results."""

from __future__ import annotations

import logging
import operator
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, cast

import numpy

from ronde import device
from ronde.call_site import call_site
from ronde.follower import is_of_launcher
from ronde.handle import GroupHandle, Handle, MessageHandle
from ronde.native_log import log_warnings
from ronde.ops import OPS
from ronde.plugins import Plugin, PluginOp, call_of
from ronde.process_set import ProcessSet
from ronde.tensors import Source, check_target, kind_of, owns_memory, source_of, target_like, target_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ronde import _ronde
    from ronde.replay import Replay
    from ronde.tensors import Target


class Part(NamedTuple):
    """A tensor as the native client takes it.

    place -- where it is, if that is on a GPU
    """

    dtype: str | None
    shape: Sequence[int]
    address: int
    nbytes: int
    place: device.DevicePlace | None

    @property
    def tensor(self) -> tuple[str | None, Sequence[int], int, int]:
        """All but the place."""
        return self.dtype, self.shape, self.address, self.nbytes


class Submission:
    """The base of a client, through which it submits all operations."""

    _session: _ronde.Session
    _sets: dict[int, ProcessSet]
    _replay: Replay | None

    @property
    def replay(self) -> Replay | None:
        """What performs interrupted operations again, with on_failure="continue"; for libraries over this client."""
        return self._replay

    def completions(self) -> _ronde.Completions:
        """Returns a counter of operations submitted with `notify` that complete while no thread waits for them.

        It is for programs that wait for any of many operations. Raises the session's error if it is over.
        """
        return self._session.completions()

    def log_notices(self) -> None:
        """Logs the sidecar's notices, for example about stragglers. Waits call this by themselves.

        `ronde run` shows the log of the sidecars, which has them. Its workers do not repeat them there; a program that
        handles log records gets them.
        """
        is_shown = is_of_launcher() and not _log.hasHandlers()
        for notice in self._session.take_notices():
            if not is_shown:
                _log.warning("%s", notice)
        log_warnings()

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
        """Submits one operation on a tensor or a source. Without `read`, its result is of the tensor's library."""
        source = tensor if isinstance(tensor, Source) else source_of(tensor)
        self._label(options, name, process_set)
        if "mapped" not in options:
            options["mapped"] = out is None and source.view is not None
        operation = self._begin(kind, _part(source), options)
        if read is None:
            # The result's memory is allocated while the operation is in flight, which costs no time.
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
        """All-reduces a gradient. The result may replace the gradient's memory instead of being copied to it."""
        source, target = source_of(gradient), target_of(gradient)
        view = source.view if owns_memory(gradient) else None

        def read(operation: _ronde.Operation) -> torch.Tensor:
            memory = None if view is None else operation.take_mapped()
            if view is None or memory is None:
                target.fill(operation)
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
        """Submits a group of operations. Without `reads`, their results are of the tensors' libraries."""
        sources = [tensor if isinstance(tensor, Source) else source_of(tensor) for tensor in tensors]
        targets = _targets_like(out, sources)
        self._label(options, name, process_set)
        if not sources:
            return GroupHandle([])
        parts = [_part(source) for source in sources]
        if "mapped" not in options:
            options["mapped"] = out is None and all(source.view is not None for source in sources)
        operations = self._begin_group(kind, parts, options)
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
        return self._begin(kind, _NO_TENSOR, options)

    def _begin(self, kind: str, part: Part, options: dict[str, Any]) -> _ronde.Operation:
        """Submits an operation, in a way that survives the loss of a rank if the client has been asked for that."""
        if self._replay is None and (part.place is None or not self._session.is_inline):
            if part.place is not None:
                options["device"] = part.place
            return self._session.submit(kind, *part.tensor, **options)
        kept, tensor = _in_host_memory(part)
        if self._replay is None:
            inline = self._session.submit(kind, *tensor, **options)
            del kept
            return inline
        if self._replay.takes(kind, options):
            return cast("_ronde.Operation", self._replay.submit(kind, *tensor, options))
        submitted = self._replay.call(lambda session: session.submit(kind, *tensor, **options))
        del kept
        return submitted

    def _begin_group(self, kind: str, parts: Sequence[Part], options: dict[str, Any]) -> Sequence[_ronde.Operation]:
        has_device = any(part.place is not None for part in parts)
        if self._replay is None and not (has_device and self._session.is_inline):
            if has_device:
                options["devices"] = [part.place for part in parts]
            return self._session.submit_group(kind, cast("Any", [part.tensor for part in parts]), **options)
        kept = [_in_host_memory(part) for part in parts]
        tensors = cast("Any", [tensor for _, tensor in kept])
        if self._replay is None:
            return self._session.submit_group(kind, tensors, **options)
        if self._replay.takes(kind, options):
            return cast("list[_ronde.Operation]", self._replay.submit_group(kind, tensors, options))
        return self._replay.call(lambda session: session.submit_group(kind, tensors, **options))

    def _set(self, process_set: ProcessSet | None) -> ProcessSet:
        """Returns the set, after checking that it exists and contains this rank."""
        if process_set is None:
            return self._sets[0]
        if not isinstance(process_set, ProcessSet):
            raise ValueError(
                f"process_set is {process_set!r}; give a ProcessSet: add_process_set of this client, which all ranks "
                "call with the ranks of the set, returns one"
            )
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
        """Adds an operation's name, process set and call site to its options."""
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
    """Returns a reader of results into `out`. Without `out`, the result is a view of shared memory or new memory.

    place -- memory that is already allocated, for a result of its shape
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
        return target.fill(operation)

    return read


def read_any(like: Any) -> Callable[[_ronde.Operation], Any]:
    """Returns a reader of results whose type and shape another rank determines."""
    kind = kind_of(like)

    def read(operation: _ronde.Operation) -> Any:
        target = kind(operation.dtype(), operation.shape())
        return target.fill(operation)

    return read


def read_nothing(operation: _ronde.Operation) -> None:
    """Reads an operation without a result on this rank."""
    operation.shape()  # raises the error if it failed


def _part(source: Source) -> Part:
    """Returns a tensor as the native client takes it."""
    return Part(source.dtype, source.shape, source.address, source.nbytes, source.place)


def _in_host_memory(part: Part) -> tuple[Any, tuple[str | None, Sequence[int], int, int]]:
    """Returns a part without its place, copied to main memory if it is on a GPU, and what keeps the copy alive.

    Operations that may be performed again keep their inputs, which a copy on a GPU could not survive. A session without
    shared memory has no slot to which the native client could copy.
    """
    if part.place is None:
        return None, part.tensor
    lease = device.copied_to_host(part.place)
    return lease, part._replace(address=lease.tensor.data_ptr()).tensor


def _targets_like(out: Sequence[Any] | None, sources: Sequence[Source]) -> list[Target | None]:
    if out is None:
        return [None] * len(sources)
    if len(out) != len(sources):
        raise ValueError(f"out has {len(out)} places for the results of {len(sources)} tensors")
    return [target_like(place, source) for place, source in zip(out, sources)]


def target_of_rows(out: Any, source: Source, rows: int | None) -> Target | None:
    """Returns the target for a result with other rows, if `out` is given. `rows` is None if not known yet."""
    if out is None:
        return None
    target = target_of(out)
    known = target.shape[0] if rows is None and target.shape else rows
    return check_target(target, source, (known, *source.shape[1:]))


def share_of(rows: int, process_set: ProcessSet) -> int:
    """Returns this rank's number of rows when they are divided."""
    each, more = divmod(rows, process_set.size())
    return each + (process_set.rank() < more)


def splits_of(splits: Any) -> dict[str, Any]:
    """Returns the option for the rows of each rank. The native client checks that they fit tensor and ranks."""
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
    """Returns the options of a reduction.

    Raises ValueError for a codec as `op`, for a reduction as `codec`, and for an `op` that is no constant of ronde: a
    member of PyTorch's ReduceOp converts to an integer, which is another reduction here.
    """
    if isinstance(op, Plugin):
        raise ValueError(f"op={op} is a codec; give codec={op}, or ronde.PluginOp for a plugin that reduces")
    if isinstance(codec, PluginOp):
        raise ValueError(f"codec={codec} is a reduction; give op={codec}, or ronde.Plugin for a plugin that is a codec")
    options: dict[str, Any] = {"op": op, "prescale": prescale_factor, "postscale": postscale_factor}
    if isinstance(op, PluginOp):
        if codec is not None:
            raise ValueError(f"op={op} with codec={codec!r}: values reach a plugin as they are; leave the codec out")
        options.update(op=BY_PLUGIN, plugin=call_of(op))
        return options
    if isinstance(op, bool) or not isinstance(op, (int, numpy.integer)) or op not in OPS:
        raise ValueError(
            f"op is {op!r}; give a reduction of ronde: ronde.Average, ronde.Sum, ronde.Min, ronde.Max, ronde.Product, "
            "ronde.Adasum, ronde.Median, ronde.ClippedMean, ronde.BitAnd, ronde.BitOr, ronde.BitXor or a ronde.PluginOp"
        )
    if isinstance(codec, Plugin):
        options["plugin"] = call_of(codec)
    elif codec is not None:
        options["codec"] = codec
    return options


def rank_number(rank: Any) -> int:
    """Returns a rank as an integer. Raises ValueError for anything that cannot be a rank."""
    return _number(rank, "ranks are integers from 0")


def tag_number(tag: Any) -> int:
    """Returns a tag as an integer. Raises ValueError for anything that cannot be a tag."""
    return _number(tag, "tags are integers from 0 to 2^32 - 1")


def _number(given: Any, rule: str) -> int:
    """Returns an integer of 32 bits. Raises ValueError with the rule for anything else."""
    try:
        number = operator.index(given)
    except TypeError:
        number = -1
    if not 0 <= number < 1 << 32:
        raise ValueError(f"{rule}, not {given!r}")
    return number


# Smaller results are copied; the native client has the same limit.
MAPPED_BYTES_MIN = 64 << 10
# Operations whose result has the input's shape.
_LIKE_THE_INPUT = frozenset(("allreduce", "broadcast"))
# The native client's number of a reduction by a plugin.
BY_PLUGIN = 8

_NO_TENSOR = Part(None, (), 0, 0, None)

_log = logging.getLogger("ronde")
