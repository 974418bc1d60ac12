"""The groups of this process, and the session that they share."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Callable

from ronde.errors import PeerLostError, RondeError, ShutDownError
from ronde.torch.distributed.group import CAN_EXTEND_BACKEND, Group, GroupClass
from ronde.torch.distributed.members import Members, made_by_members
from ronde.torch.distributed.progress import Completer
from ronde.torch.distributed.ranks import Ranks
from ronde.torch.distributed.survivors import Survivors

if TYPE_CHECKING:
    import datetime
    from collections.abc import Iterable, Sequence

    from ronde.client import Client

# Of this process, those that have a group: the end of the program shuts them down.
_all: list[Groups] = []
# How long a rank that is done waits for the others, whose operations the end of the session would fail.
LEAVE_TIMEOUT_S = 30.0


class Groups:
    """The groups of this process over one session. PyTorch's own objects do not keep them alive.

    end -- ends the session, which ends with the last group; None if it is somebody else's
    """

    def __init__(self, client: Client, end: Callable[[], None] | None) -> None:
        self.client = client
        self._end = end
        self.completer = Completer(client.completions())
        self.alive: list[Group] = []
        self.averaging_hooks = 0  # of `register_hook`
        everybody = tuple(range(client.size))
        self._lock = threading.Lock()
        self._members = {everybody: Members(everybody, client.global_process_set)}
        self._made: dict[tuple[int, ...], int] = {}
        self._handles: Survivors | None = None
        _all.append(self)

    def exchange_handles(self) -> None:
        """Begins to exchange what ranks need to continue without others. All ranks of the session call this once."""
        if CAN_EXTEND_BACKEND and self._handles is None:
            self._handles = Survivors(self.client, self.completer)

    def register(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Begins to make the process sets of those of these groups that this rank belongs to."""
        for ranks in groups:
            wrong = [rank for rank in ranks if not 0 <= rank < self.client.size]
            if wrong or len(set(ranks)) < len(ranks):
                raise ValueError(
                    f"{list(ranks)} is no group: ranks of this job are 0 to {self.client.size - 1}, each once"
                )
            if self.client.rank in ranks:
                self._members_of(ranks)

    def _members_of(self, ranks: tuple[int, ...]) -> Members:
        with self._lock:
            members = self._members.get(ranks)
            if members is None or members.is_failed:
                members = self._members[ranks] = made_by_members(self.client, ranks)
            return members

    def make(self, order: Sequence[int], name: str, timeout: datetime.timedelta) -> Group | None:
        """Makes a group of these ranks, in this order. Returns None if this rank is not one of them.

        name -- PyTorch's name of the group. It is no part of the names of operations: where members make groups without
                the others (use_local_synchronization), PyTorch's names of one group differ between its members.
        """
        if self.client.rank not in order:
            return None
        ranks, label = self.ranks_of(order)
        group: Group = GroupClass(ranks, name, label, timeout, self)
        self.alive.append(group)
        return group

    def ranks_of(self, order: Sequence[int]) -> tuple[Ranks, str]:
        """Returns the ranks of a new group, in this order, and the label of the group."""
        ranks = tuple(sorted(order))
        members = self._members_of(ranks)
        # All members of a group have made as many groups of exactly these ranks before, whatever else they have made.
        number = self._made[ranks] = self._made.get(ranks, -1) + 1
        label = f"c10d.{number}"
        return Ranks(self.client, members, order, label), label

    def without_others(self, order: Sequence[int], name: str, timeout: datetime.timedelta, aborts: bool) -> Group:
        """Makes a group of these ranks, which all call this. Others may have died.

        aborts -- whether these ranks leave the session, which ends for the others, too

        The group is of this session if that is open, else of a new one. Raises RondeError if the ranks do not meet.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        if aborts:
            self._abort_all()
        elif self.client.is_open:
            made = self.make(order, name, timeout)
            assert made is not None, "the caller is one of the ranks"
            try:
                made.meet(deadline)
            except (PeerLostError, ShutDownError):
                pass  # the session is over, for all ranks
            except BaseException:
                made.abort()
                raise
            else:
                return made
        if self._handles is None:
            raise RondeError(
                "ranks continue without others only where the default group is of the backend ronde, but this job has "
                "made none",
                "settings",
            )
        begun = self._handles.session(order, max(deadline - time.monotonic(), 1.0))
        groups = Groups(begun.client, begun.close)
        groups.exchange_handles()
        survivors = groups.make(range(len(order)), name, timeout)
        assert survivors is not None, "the caller is one of the ranks"
        return survivors

    def _abort_all(self) -> None:
        """Fails the operations of all groups, on all ranks, and ends the session."""
        error = RondeError("this rank has left the session for shrink_group with SHRINK_ABORT", "aborted")
        for group in self.alive:
            group.fail_operations(error)
        self.client.close()

    def shutdown(self) -> None:
        """Shuts all groups down, for a program that ends. Does nothing where the session is somebody else's."""
        if self._end is not None:
            for group in reversed(self.alive.copy()):
                group.shutdown()

    def leave(self, group: Group, is_aborted: bool, timeout: float = LEAVE_TIMEOUT_S) -> None:
        """Removes a group that is shut down. Ends the session with the last one, if the session began here.

        That ends it for all ranks, so they run a barrier first, unless this rank aborts or an exception ends it.

        timeout -- for the barrier, in seconds
        """
        if group not in self.alive:
            return
        self.alive.remove(group)
        if self.alive or self._end is None:
            return
        if not is_aborted and sys.exc_info()[0] is None:
            with contextlib.suppress(RondeError, TimeoutError):  # of ranks that are late, or have left or failed
                self.client.barrier_async("c10d.end").wait(timeout)
        self.end()

    def end(self) -> None:
        """Ends the session, if it began here, whatever groups there are."""
        self.alive.clear()
        if self in _all:
            _all.remove(self)
        self.completer.close()
        if self._end is not None:
            self._end()


def shut_down_all() -> None:
    """Shuts down the groups of all sessions, for a program that ends."""
    for groups in reversed(_all.copy()):
        groups.shutdown()
