"""A group whose ranks change: each call of `reconfigure` begins a new session of those that handles name.

`torch.distributed.init_process_group("ronde", enable_reconfigure=True)` makes one. It is a process group written in
Python, because PyTorch's own takes its rank and size from its backend, which cannot change them.
"""

from __future__ import annotations

import datetime
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch._C import _distributed_c10d as c10d

from ronde import handles
from ronde.errors import RondeError, ShutDownError
from ronde.reconfigure import begin, world_of
from ronde.torch.distributed.group import WholeGroup
from ronde.torch.distributed.groups import LEAVE_TIMEOUT_S, Groups
from ronde.torch.distributed.work import Together

if TYPE_CHECKING:
    from ronde.reconfigure import Session
    from ronde.torch.distributed.progress import Lane
    from ronde.torch.distributed.ranks import Ranks
    from ronde.torch.distributed.work import Operation

_NOT_CONFIGURED = (
    "this process group has no members yet: exchange handles (torch.distributed._get_reconfigure_handle) and call "
    "torch.distributed._reconfigure on all of them before the first operation"
)


class ReconfigurableGroup(WholeGroup):
    """A process group that `reconfigure` gives other members, and that keeps its handle and name meanwhile.

    rank, size -- what the group reports before the first `reconfigure`
    name       -- PyTorch's name of the group
    timeout    -- after which an operation is given up, and the default of `reconfigure`
    handle     -- that of this process in this group
    """

    supports_reconfigure = True

    def __init__(
        self, rank: int, size: int, name: str, timeout: datetime.timedelta, reuses_uuids: bool = False
    ) -> None:
        torch.distributed.ProcessGroup.__init__(self, rank, size)
        self._given = rank, size
        self._members: Ranks | None = None
        self._why = _NOT_CONFIGURED
        self._is_alone = False
        self._unwaited = {}
        self._name, self._timeout = name, timeout
        self.handle = handles.own_handle()
        self._uuids: set[int] | None = None if reuses_uuids else set()
        self._operations: list[Operation] = []
        self._failure: Exception | None = None
        self._reconfiguring = threading.Lock()
        self._session: Session | None = None

    @property
    def _ranks(self) -> Ranks:
        if self._members is None:
            raise RondeError(self._why, "settings")
        return self._members

    @_ranks.setter
    def _ranks(self, ranks: Ranks) -> None:
        self._members = ranks

    def rank(self) -> int:
        """Returns this process's rank among the present members."""
        members = self._members
        return self._given[0] if members is None else members.me

    def size(self) -> int:
        """Returns the number of present members."""
        members = self._members
        return self._given[1] if members is None else members.size

    getRank, getSize = rank, size  # noqa: N815 - as C++ calls them

    def get_reconfigure_handle(self) -> str:
        """Returns what the other members need to know of this process; the same text for the life of the group."""
        return self.handle.encode()

    def reconfigure(self, opts: Any) -> Together:
        """Makes those whose handles are given the members, in a separate session. All of them call this.

        opts -- PyTorch's ReconfigureOptions: `uuid`, a number that this group has not had before; `handles`, a list in
                the order of ranks, or a set, whose order is that of the handles' IDs; `timeout`, for the members to
                come. Hints are not used.

        Operations in flight fail. Returns when all members have come, with work that is complete. Raises ValueError for
        a number that was used before, RondeError as `ronde.reconfigure.world_of` does, before anything has changed, and
        TimedOutError if a member does not come, which the text names by its rank: the group has no members then, and
        may be reconfigured again.
        """
        with self._reconfiguring:
            timeout = opts.timeout or self._timeout
            if self._uuids is not None and opts.uuid in self._uuids:
                raise ValueError(
                    f"uuid {opts.uuid} has been used by this group; each call of reconfigure takes a new one"
                )
            world = world_of(opts.uuid, opts.handles, self.handle)
            if self._uuids is not None:
                self._uuids.add(opts.uuid)
            self._leave("the group has been reconfigured")
            self._enter(begin(world, timeout.total_seconds()))
        return Together([])

    def _enter(self, session: Session) -> None:
        groups = Groups(session.client, session.close)
        ranks, label = groups.ranks_of(range(session.client.size))
        self._session = session
        self._operations, self._failure = [], None
        self._set_up(ranks, self._name, label, self._timeout, groups)
        groups.alive.append(self)
        world = torch.distributed.distributed_c10d._world
        if self in world.pg_group_ranks:
            world.pg_group_ranks[self] = {rank: rank for rank in range(ranks.size)}

    def _leave(self, why: str) -> None:
        """Leaves the session without waiting for others. Operations in flight fail, those of its groups, too."""
        session, self._session = self._session, None
        if session is None:
            return
        error = ShutDownError(f"{why}; this rank has left its session", "aborted")
        for group in self.groups.alive:
            group.fail_operations(error)
        self._members, self._why = None, f"{why}: call reconfigure before the next operation"
        self.groups.end()

    def abort(self) -> None:
        """Leaves the session, which fails operations in flight on all members. `reconfigure` may follow."""
        self._leave("the group was aborted")

    def shutdown(self, timeout: float = LEAVE_TIMEOUT_S) -> None:
        """Leaves the session when the other members do so, too, or after the timeout, in seconds."""
        session, self._session = self._session, None
        if session is not None:
            self.groups.leave(self, False, timeout)
            self._members, self._why = None, "the group was shut down: call reconfigure before the next operation"

    def _added(self, lane: Lane, operation: Operation, notify: bool) -> Operation:
        added = super()._added(lane, operation, notify)
        self._note_failures()
        self._operations.append(added)
        return added

    def _note_failures(self) -> None:
        """Forgets operations that are complete, and keeps the first error since the last `reconfigure`."""
        operations, self._operations = self._operations, []
        for operation in operations:
            if not operation.is_completed():
                self._operations.append(operation)
            elif self._failure is None:
                self._failure = operation.exception()

    def errored(self) -> Exception | None:
        """Returns an error if the group has no members, or the first one of its operations that failed; else None.

        A member that leaves when all operations are complete is no error until the next operation.
        """
        if self._session is None:
            return RondeError(self._why, "aborted")
        self._note_failures()
        return self._failure

    def get_error(self) -> Any:
        """Returns PyTorch's ErrorType: COMM_ERROR if `errored` returns an error, else SUCCESS."""
        return c10d.ErrorType.SUCCESS if self.errored() is None else c10d.ErrorType.COMM_ERROR
