"""The state of a group, and the submission of its operations under names on which its ranks agree."""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
import weakref
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable

import torch

from ronde.errors import RondeError
from ronde.torch.distributed import hooks, streams
from ronde.torch.distributed.progress import IN_FLIGHT_MAX, Lane
from ronde.torch.distributed.work import Call, Operation, Together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.torch.distributed.progress import Completer
    from ronde.torch.distributed.ranks import Ranks, Start

_NO_TIMEOUT = datetime.timedelta(0)
# How long a rank whose arguments are wrong waits for the group's members, to tell them.
_REFUSAL_TIMEOUT = datetime.timedelta(seconds=30)


class _Begun(threading.local):
    """The operation that this thread begins while it is in a function of PyTorch, which returns a wrapper of it."""

    is_recorded = False
    work: Operation | Together | None = None
    count = 0  # of calls of `_begin`, also of those that raised

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


class _Coalescing(threading.local):
    """The list of operations that this thread coalesces in a group; None outside of such a block."""

    operations: list[Operation] | None = None


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
        self._hooks = 0
        self._coalescing = _Coalescing()

    def _begin(
        self,
        kind: str,
        start: Start,
        opts: Any,
        results: Sequence[torch.Tensor],
        finish: Callable[[Any], None] | None = None,
    ) -> Operation:
        """Starts an operation. Its name is its kind and a number: all ranks start those of a kind in the same order.

        An operation has a number as soon as the group's members have met, and keeps it if its submission fails: the
        other ranks' operation of this number fails then, too, and later ones match.

        Calls of a hook have a number within the hook instead, and a separate lane, as the module `hooks` explains.

        Numbers are reused, because requests that repeat are soon not negotiated any more. The previous operation of a
        name is complete by then: the lane submits at most as many at once as there are numbers.
        """
        begun.count += 1
        given = getattr(opts, "timeout", None)
        timeout = given if given is not None and given > _NO_TIMEOUT else self._timeout
        deadline = time.monotonic() + timeout.total_seconds()
        self._ranks.meet(deadline)
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
        call = Call(name, nbytes, lambda notify: start(name, notify), finished, streams.events_of(kept))
        is_async = getattr(opts, "asyncOp", True) or self._coalescing.operations is not None
        try:
            return self._added(lane, Operation(lane, call, timeout, deadline), is_async)
        except Exception:
            self._fail_on_others(kind, name, lane, timeout)
            raise

    def by_bucket(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a communication hook of a model that has this group, whose members register theirs in the same order.

        They are numbered in the group, because its members may have other groups with their own models.
        """
        self._hooks += 1
        return hooks.by_bucket(hook, f"hook.{self._hooks}", self._completer, Lane)

    def _refuse(self, kind: str, error: Exception) -> None:
        """Takes a number and fails its operation on the other ranks, for an error in this rank's arguments.

        Raises it, too, if the other members have not made the group yet.
        """
        patience = SimpleNamespace(timeout=min(self._timeout, _REFUSAL_TIMEOUT))
        try:
            self._begin(kind, self._ranks.refusal(kind), patience, [])
        except RondeError as late:
            raise error from late

    def _fail_on_others(self, kind: str, name: str, lane: Lane, timeout: datetime.timedelta) -> None:
        """Fails an operation on the other ranks whose submission has failed on this one."""
        refusal = self._ranks.refusal(kind)
        call = Call(name, 0, lambda notify: refusal(name, notify), lambda nothing: [])
        # The session may be what has failed, on all ranks. The caller raises the first error.
        with contextlib.suppress(RondeError, ValueError):
            lane.add(Operation(lane, call, timeout), True)

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

        call = Call(name, tensor.nbytes, lambda notify: start(None, notify), finish, streams.events_of([tensor]))
        operation = Operation(lane, call, timeout or self._timeout)
        self._ranks.meet(operation.deadline)
        return self._added(lane, operation, True)

    def _added(self, lane: Lane, operation: Operation, notify: bool) -> Operation:
        """Submits an operation, after the group's members have met."""
        lane.add(operation, notify)
        self._count += 1
        if self._coalescing.operations is not None:
            self._coalescing.operations.append(operation)
        begun.note(operation)
        return operation

    def meet(self, deadline: float) -> None:
        """Waits until all members have made the group.

        deadline -- of the monotonic clock

        Raises TimedOutError after it, and the errors of the creation of the group.
        """
        self._ranks.meet(deadline)

    def fail_operations(self, error: Exception) -> None:
        """Fails all operations in flight on this rank, and therefore on the others. Later ones raise the error."""
        self._ranks.abort(error)
        for lane in [self._lane, *self._message_lanes]:
            lane.abort(error)

    def start_coalescing(self) -> None:
        """Begins a list of this thread's operations that `end_coalescing` returns as one.

        They are submitted at once all the same. A list that is there already is dropped: PyTorch does not end that of
        a block which an exception has left.
        """
        self._coalescing.operations = []

    def end_coalescing(self) -> Together:
        """Returns the operations since `start_coalescing` as one."""
        operations, self._coalescing.operations = self._coalescing.operations, None
        if operations is None:
            raise RuntimeError("end_coalescing was called without start_coalescing")
        together = Together(operations)
        begun.note(together)
        return together
