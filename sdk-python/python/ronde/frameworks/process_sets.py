"""Process sets: subsets of the ranks that perform collectives among themselves."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy

from ronde.errors import MismatchError, RefusedError
from ronde.frameworks import communicators, world

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ronde.client import Client
    from ronde.process_set import ProcessSet as JobSet


class ProcessSet:
    """A subset of the ranks, from numbers or an mpi4py communicator. It can be used once it is registered.

    process_set_id -- None until it is registered by `init(process_sets=[...])` or `add_process_set`, and after it was
                      removed
    ranks          -- ascending; None while only the communicator knows them
    mpi_comm       -- the communicator that it was made from, else None

    Raises ValueError for other arguments.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self.process_set_id: int | None = None
        self.ranks: list[int] | None = None
        self.mpi_comm: Any = None
        self._members: JobSet | None = None
        if communicators.is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
        else:
            self.ranks = sorted(communicators.rank_list(ranks_or_comm, "ProcessSet takes"))

    def size(self) -> int | None:
        """The number of its ranks; None until it is registered."""
        return None if self.process_set_id is None or self.ranks is None else len(self.ranks)

    def rank(self) -> int | None:
        """This process's number among its ranks, from 0; None until it is registered.

        Raises ValueError if this process is not in it.
        """
        if self.process_set_id is None or self.ranks is None:
            return None
        me = world.current().rank
        if me not in self.ranks:
            raise ValueError(f"Rank {me} is not part of provided process set: {self}")
        return self.ranks.index(me)

    def included(self) -> bool | None:
        """Whether this process is in it; None while its ranks are not known."""
        return None if self.ranks is None else world.current().rank in self.ranks

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy of the set of all ranks would be one that is not registered.
        return "global_process_set" if self is global_process_set else super().__reduce_ex__(protocol)

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


def _global_set() -> ProcessSet:
    everybody = ProcessSet([])
    everybody.process_set_id, everybody.ranks = 0, None
    return everybody


global_process_set = _global_set()
"""The set of all ranks, the default of every operation."""


def members_of(process_set: ProcessSet) -> JobSet | None:
    """Returns the client's set for a set: None for all ranks of the job.

    Raises ValueError for a set that is not registered or does not contain this process, and before `init`.
    """
    current = world.current()
    if process_set is global_process_set:
        return current.base
    members = getattr(process_set, "_members", None)
    if members is None or process_set.process_set_id is None:
        raise ValueError(f"Process set provided does not exist, or has not been registered. It is {process_set}.")
    if not members.included():
        raise ValueError(f"Rank {current.rank} is not a member of the provided process set. It is {process_set}.")
    checked: JobSet = members
    return checked


def root_of(root_rank: int, process_set: ProcessSet) -> int:
    """Returns the rank in the job of the root of a broadcast. Raises ValueError for one that is not in the set."""
    current = world.current()
    ranks = range(current.size) if process_set.ranks is None else process_set.ranks
    if root_rank not in ranks:
        raise ValueError(f"broadcast received invalid root rank {root_rank}: it is not among the ranks {list(ranks)}")
    return current.job_ranks[root_rank]


def reduces(process_set: ProcessSet) -> bool:
    """Returns whether this process is in a set of several ranks.

    Raises ValueError for a set that contains this process and is not registered, and before `init`.
    """
    if not process_set.included():
        return False
    members_of(process_set)
    return size_of(process_set) > 1


def size_of(process_set: ProcessSet) -> int:
    """Returns the number of a registered set's ranks. Raises ValueError before `init`."""
    world.current()
    return len(process_set.ranks or [])


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Registers a process set while the job runs. All ranks must call it, also those outside the set.

    They must pass the same ranks. Requires `init(process_sets="dynamic")` or HOROVOD_DYNAMIC_PROCESS_SETS=1. Returns
    the given set, or a new one of the given ranks. Raises ValueError if sets are not dynamic, for invalid or duplicate
    ranks, for ranks that already form a set, and if ranks disagree; NotImplementedError for a set of a communicator.
    """
    current = world.current()
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    if added.mpi_comm is not None:
        raise NotImplementedError(
            "a process set of an MPI communicator is registered by hvd.init(comm, process_sets=[...]); later give ranks"
        )
    if not current.is_dynamic:
        raise ValueError(
            "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding process sets after hvd.init(), or call "
            'hvd.init(process_sets="dynamic")'
        )
    _register(added, [added.ranks or []])
    return added


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set and sets its `process_set_id` to None. All ranks must call it.

    Returns False, and does nothing, for the set of all ranks and one that is not registered. Raises ValueError if
    process sets are not dynamic, as `add_process_set` does.
    """
    current = world.current()
    if not isinstance(process_set, ProcessSet):
        raise ValueError(f"{process_set!r} is no process set")
    members = process_set._members
    if process_set is global_process_set or members is None or process_set.process_set_id is None:
        return False
    if not current.is_dynamic:
        raise ValueError(
            "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow removing process sets after hvd.init(), or call "
            'hvd.init(process_sets="dynamic")'
        )
    is_removed = current.client.remove_process_set(members)
    _unregister(process_set)
    return is_removed


def register_static(process_sets: Sequence[Any]) -> None:
    """Registers the sets that `init` was given, in their order, which is the same on all ranks.

    Raises ValueError on all ranks for an invalid or duplicate set, and for one that differs between ranks.
    """
    for number, each in enumerate(process_sets):
        if not isinstance(each, ProcessSet):
            raise ValueError(f"process_sets has {each!r} at {number}; give a list of hvd.ProcessSet")
    client = world.current().client
    mine = [_ranks_now(each) for each in process_sets]
    everybodys = exchanged(client, mine, "process_sets")
    if len({len(lists) for lists in everybodys}) != 1:
        raise ValueError("process_sets has not the same length on all ranks")
    seen: list[list[int]] = [list(range(world.current().size))]
    for number, each in enumerate(process_sets):
        distinct = sorted({tuple(lists[number]) for lists in everybodys})
        if len(distinct) > 1 and each.mpi_comm is None:
            raise ValueError(f"process_sets entry number {number} is not the same on all ranks: {distinct}")
        if any(list(ranks) in seen for ranks in distinct):
            raise ValueError(f"process_sets entry number {number} is a duplicate")
        seen.extend(list(ranks) for ranks in distinct)
        _register(each, [list(ranks) for ranks in distinct])


def exchanged(client: Client, mine: Any, name: str, members: JobSet | None = None) -> list[Any]:
    """Gathers a value of each rank, in rank order. Values must be representable in JSON."""
    text = numpy.frombuffer(json.dumps(mine).encode() + b"\n", dtype=numpy.uint8)
    received = client.allgather(text, f"ronde.{name}", process_set=members)
    return [json.loads(line) for line in received.tobytes().decode().splitlines()]


def begin(comm: Any) -> None:
    """Sets the ranks of the set of all ranks, and the communicator that `init` was given."""
    global_process_set.ranks = list(range(world.current().size))
    global_process_set.mpi_comm = comm if communicators.is_communicator(comm) else None
    world.changed()


def end() -> None:
    """Unregisters all sets at the end of the session."""
    for registered in list(_registered):
        _unregister(registered)
    global_process_set.ranks = global_process_set.mpi_comm = None


_registered: list[ProcessSet] = []


def _ranks_now(process_set: ProcessSet) -> list[int]:
    if process_set.mpi_comm is None:
        return list(process_set.ranks or [])
    return sorted(communicators.world_ranks(process_set.mpi_comm))


def _register(process_set: ProcessSet, lists: list[list[int]]) -> None:
    """Registers a set, or, for a communicator, one for each list; this process keeps the one that contains it."""
    current = world.current()
    if process_set.process_set_id is not None:
        raise ValueError(f"{process_set} is a duplicate process set: it is registered already")
    for ranks in lists:
        if any(rank >= current.size for rank in ranks):
            raise ValueError(f"process set {ranks} has a rank that is not among the {current.size} ranks of the job")
        try:
            members = current.client.add_process_set(current.job_ranks[rank] for rank in ranks)
        except (RefusedError, MismatchError) as error:
            raise ValueError(f"duplicate process set, or one that cannot be: {error}") from error
        if current.rank in ranks or process_set.mpi_comm is None:
            process_set.process_set_id, process_set.ranks, process_set._members = members.id, sorted(ranks), members
    _registered.append(process_set)
    world.changed()


def _unregister(process_set: ProcessSet) -> None:
    process_set.process_set_id = process_set._members = None
    if process_set.mpi_comm is not None:
        process_set.ranks = None
    _registered[:] = [each for each in _registered if each is not process_set]
    world.changed()


def registered() -> list[ProcessSet]:
    """Returns the sets that are registered, but not that of all ranks."""
    return list(_registered)
