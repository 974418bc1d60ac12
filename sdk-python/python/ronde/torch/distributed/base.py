"""The state of a group, and the submission of its operations under names on which its ranks agree."""

from __future__ import annotations

import datetime
import threading
import weakref
from typing import TYPE_CHECKING, Any, Callable

import torch

from ronde.torch.distributed import hooks
from ronde.torch.distributed.progress import IN_FLIGHT_MAX, Lane
from ronde.torch.distributed.work import Call, Operation, Together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.torch.distributed.progress import Completer
    from ronde.torch.distributed.ranks import Ranks, Start

_NO_TIMEOUT = datetime.timedelta(0)


class _Begun(threading.local):
    """The operation that this thread begins while it is in a function of PyTorch, which returns a wrapper of it."""

    is_recorded = False
    work: Operation | Together | None = None

    def record(self) -> tuple[bool, Operation | Together | None]:
        """Begins to record. Returns what `restore` takes."""
        before = self.is_recorded, self.work
        self.is_recorded, self.work = True, None
        return before

    def restore(self, before: tuple[bool, Operation | Together | None]) -> None:
        """Ends the recording and forgets the operation."""
        self.is_recorded, self.work = before

    def note(self, work: Operation | Together) -> None:
        """Records an operation, if it is asked for."""
        if self.is_recorded:
            self.work = work


begun = _Begun()


class GroupBase:
    """A group's ranks, names, timeout and operations in flight.

    ranks     -- its ranks
    label     -- a part of the names of its operations, the same on its ranks and unique among the groups of these ranks
    timeout   -- after which an operation is given up
    completer -- finishes operations that no thread waits for
    """

    def _begin_group(self, ranks: Ranks, label: str, timeout: datetime.timedelta, completer: Completer) -> None:
        self._ranks, self._label, self._timeout = ranks, label, timeout
        self._completer = completer
        self._lane = Lane(completer)
        self._message_lanes: weakref.WeakSet[Lane] = weakref.WeakSet()
        self._started: dict[str, int] = {}
        self._count = 0
        self._coalesced: list[Operation] | None = None

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
        timeout = given if given is not None and given > _NO_TIMEOUT else self._timeout
        call = Call(name, nbytes, lambda notify: start(name, notify), finished)
        operation = Operation(lane, call, timeout)
        is_async = getattr(opts, "asyncOp", True) or self._coalesced is not None
        return self._added(lane, operation, is_async)

    def _begin_message(
        self, name: str, start: Start, tensor: torch.Tensor, timeout: datetime.timedelta | None
    ) -> Operation:
        """Starts a message. Messages complete in any order, each in a separate lane."""
        lane = Lane(self._completer)
        self._message_lanes.add(lane)
        operation: Operation

        def finish(source: int | None) -> list[torch.Tensor]:
            operation.source = source
            return [tensor]

        call = Call(name, tensor.nbytes, lambda notify: start(None, notify), finish)
        operation = Operation(lane, call, timeout or self._timeout)
        return self._added(lane, operation, True)

    def _added(self, lane: Lane, operation: Operation, notify: bool) -> Operation:
        # The first operation waits until the group's other members have made the group, too.
        self._ranks.meet(operation.deadline)
        lane.add(operation, notify)
        self._count += 1
        if self._coalesced is not None:
            self._coalesced.append(operation)
        begun.note(operation)
        return operation

    def _abort_operations(self, error: Exception) -> None:
        """Fails all operations in flight on this rank, and therefore on the others."""
        for lane in [self._lane, *self._message_lanes]:
            lane.abort(error)

    def start_coalescing(self) -> None:
        """Begins a list of operations that `end_coalescing` returns as one. They are submitted at once all the same."""
        if self._coalesced is not None:
            raise RuntimeError("start_coalescing was called twice; end_coalescing ends the first list")
        self._coalesced = []

    def end_coalescing(self) -> Together:
        """Returns the operations since `start_coalescing` as one."""
        if self._coalesced is None:
            raise RuntimeError("end_coalescing was called without start_coalescing")
        together, self._coalesced = Together(self._coalesced), None
        begun.note(together)
        return together
