"""The groups of this process, and the session that they share."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING

import ronde.torch.basics
from ronde.errors import RondeError
from ronde.torch.distributed.group import Group, GroupClass
from ronde.torch.distributed.members import Members, made_by_members
from ronde.torch.distributed.progress import Completer
from ronde.torch.distributed.ranks import Ranks

if TYPE_CHECKING:
    import datetime
    from collections.abc import Iterable, Sequence

    from ronde.client import Client

# How long a rank that is done waits for the others, whose operations the end of the session would fail.
LEAVE_TIMEOUT_S = 30.0


class Groups:
    """The groups of this process over one session. PyTorch's own objects do not keep them alive.

    is_session_ours -- whether the session ends with the last group
    """

    def __init__(self, client: Client, is_session_ours: bool) -> None:
        self.client = client
        self._is_session_ours = is_session_ours
        self.completer = Completer(client.completions())
        self.alive: list[Group] = []
        self.hooks = 0
        everybody = tuple(range(client.size))
        self._lock = threading.Lock()
        self._members = {everybody: Members(everybody, client.global_process_set)}
        self._made: dict[tuple[int, ...], int] = {}

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
        ranks = tuple(sorted(order))
        members = self._members_of(ranks)
        # All members of a group have made as many groups of exactly these ranks before, whatever else they have made.
        number = self._made[ranks] = self._made.get(ranks, -1) + 1
        label = f"c10d.{number}"
        group: Group = GroupClass(
            Ranks(self.client, members, order, label), name, label, timeout, self.completer, self._leave, self.make
        )
        self.alive.append(group)
        return group

    def shutdown(self) -> None:
        """Shuts all groups down, for a program that ends. Does nothing where the session is somebody else's."""
        if self._is_session_ours:
            for group in reversed(self.alive.copy()):
                group.shutdown()

    def _leave(self, group: Group, is_aborted: bool) -> None:
        """Removes a group that is shut down. Ends the session with the last one, if the session began here.

        That ends it for all ranks, so they run a barrier first, unless this rank aborts or an exception ends it.
        """
        if group not in self.alive:
            return
        self.alive.remove(group)
        if self.alive or not self._is_session_ours:
            return
        if not is_aborted and sys.exc_info()[0] is None:
            with contextlib.suppress(RondeError, TimeoutError):  # of ranks that are late, or have left or failed
                self.client.barrier_async("c10d.end").wait(LEAVE_TIMEOUT_S)
        self.completer.close()
        ronde.torch.basics.shutdown()
