"""How operations are submitted: arguments checked, tensors handed over, results read."""

from __future__ import annotations

import logging
import operator
from typing import TYPE_CHECKING, Any, Callable

import numpy

from ronde.call_site import call_site
from ronde.handle import GroupHandle, Handle
from ronde.tensors import Source, kind_of, source_of, target_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde import _ronde
    from ronde.process_set import ProcessSet
    from ronde.tensors import Empty, Target


class Submission:
    """The base of a client: one way for all operations."""

    _session: _ronde.Session
    _sets: dict[int, ProcessSet]

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
        out: Any = None,
        read: Callable[[_ronde.Operation], Any] | None = None,
        **options: Any,
    ) -> Handle:
        """One operation on a tensor, which may be a source already; without a `read` its result is of the same kind."""
        source = tensor if isinstance(tensor, Source) else source_of(tensor)
        read = read or read_tensor(source.empty, None if out is None else _target_like(out, source))
        options.update(_named(name), **self._numbered(process_set), site=call_site())
        operation = self._session.submit(kind, source.dtype, source.shape, source.address, source.nbytes, **options)
        return Handle(self.log_notices, operation, read)

    def _submit_group(
        self, kind: str, tensors: Sequence[Any], name: str | None, process_set: ProcessSet | None, **options: Any
    ) -> GroupHandle:
        sources = [tensor if isinstance(tensor, Source) else source_of(tensor) for tensor in tensors]
        options.update(_named(name), **self._numbered(process_set), site=call_site())
        if not sources:
            return GroupHandle([])
        parts = [(source.dtype, source.shape, source.address, source.nbytes) for source in sources]
        operations = self._session.submit_group(kind, parts, **options)
        reads = [read_tensor(source.empty) for source in sources]
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
        options.update(_named(name), **self._numbered(process_set), site=call_site())
        return Handle(self.log_notices, self._session.submit(kind, None, (), 0, 0, **options), read)

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

    def _numbered(self, process_set: ProcessSet | None) -> dict[str, Any]:
        number = self._set(process_set).id
        return {"set": number} if number else {}

    def _for_root(self, root: int, source: Source) -> Callable[[_ronde.Operation], Any]:
        return read_tensor(source.empty) if root == self._session.rank else read_nothing


def read_tensor(empty: Empty, out: Target | None = None) -> Callable[[_ronde.Operation], Any]:
    """Reads a result into `out`, or into new memory of the input's kind."""

    def read(operation: _ronde.Operation) -> Any:
        shape = operation.shape()
        target = empty(shape) if out is None else out
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


def _target_like(out: Any, source: Source) -> Target:
    target = target_of(out)
    if (target.dtype, target.shape) != (source.dtype, source.shape):
        raise ValueError(
            f"out is of type {target.dtype} and shape {target.shape}, but the result will be of type "
            f"{source.dtype} and shape {source.shape}"
        )
    return target


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


def reduction(op: int, prescale_factor: float, postscale_factor: float, codec: str | None = None) -> dict[str, Any]:
    """The options of a reduction."""
    options: dict[str, Any] = {"op": op, "prescale": prescale_factor, "postscale": postscale_factor}
    return options if codec is None else {**options, "codec": codec}


def _named(name: str | None) -> dict[str, Any]:
    return {} if name is None else {"name": name}


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


_log = logging.getLogger("ronde")
