"""The process's shared state: its client, the ranks that take part, and the operations in flight."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any, Callable, Protocol

from ronde.frameworks import nvtx

if TYPE_CHECKING:
    from ronde.client import Client
    from ronde.frameworks.hierarchy import Hosts
    from ronde.process_set import ProcessSet


class InFlight(Protocol):
    """An operation in flight."""

    def poll(self) -> bool:
        """Whether `wait` would return at once."""
        ...

    def wait(self) -> Any:
        """Waits for the result and returns it."""
        ...


class World:
    """The ranks that take part, between `init` and `shutdown`.

    client     -- the session with the sidecar
    base       -- the ranks of the job that take part; None for all
    job_ranks  -- for each rank here, its rank in the job
    rank, size, local_rank, local_size, cross_rank, cross_size, is_homogeneous -- as Horovod's functions return them
    is_dynamic -- whether process sets may be added and removed after `init`
    """

    def __init__(self, client: Client, is_dynamic: bool) -> None:
        self.client = client
        self.base: ProcessSet | None = None
        self.is_dynamic = is_dynamic
        self.hosts: Hosts | None = None  # with hierarchical Adasum
        self._named: weakref.WeakValueDictionary[tuple[str, int], Any] = weakref.WeakValueDictionary()
        self.take_all_ranks()

    def take_all_ranks(self) -> None:
        """Makes this the world of all ranks of the job, also when the client has entered another membership."""
        client = self.client
        self.job_ranks = list(range(client.size))
        self.rank, self.size = client.rank, client.size
        self.local_rank, self.local_size = client.local_rank, client.local_size
        self.cross_rank, self.cross_size = client.cross_rank, client.cross_size
        self.is_homogeneous = client.is_homogeneous

    def restrict(self, base: ProcessSet, hosts: list[int]) -> None:
        """Restricts the world to some ranks of the job.

        hosts -- for each of the set's ranks, a number that ranks of the same sidecar share
        """
        self.base, self.job_ranks = base, base.ranks
        self.rank, self.size = base.rank(), base.size()
        mine = hosts[self.rank]
        neighbours = [rank for rank, host in enumerate(hosts) if host == mine]
        self.local_rank, self.local_size = neighbours.index(self.rank), len(neighbours)
        sizes = {host: hosts.count(host) for host in hosts}  # in the order of their first ranks
        peers = [host for host, size in sizes.items() if size > self.local_rank]
        self.cross_rank, self.cross_size = peers.index(mine), len(peers)
        self.is_homogeneous = len(set(sizes.values())) == 1

    def submit(self, kind: str, name: str | None, members: ProcessSet | None, begin: Callable[[], InFlight]) -> Any:
        """Begins an operation, unless one of the same name is in flight.

        Raises ValueError in that case, and what `begin` does.
        """
        if name is None:
            with traced(kind, name):
                return begin()
        key = (f"{kind}.{name}", (members.id if members is not None else 0) or 0)
        earlier = self._named.get(key)
        if earlier is not None and not earlier.poll():
            raise ValueError(
                "Requested to allreduce, allgather, or broadcast a tensor with the same name as another tensor that is "
                f"currently being processed: {key[0]}. Wait for the first, or give this one another name."
            )
        with traced(kind, name):
            handle = begin()
        self._named[key] = handle
        return handle


class _Process:
    """The state of the process."""

    world: World | None = None
    handles: dict[int, tuple[str | None, InFlight]]
    handles_made: int = 0
    generation: int = 0

    def __init__(self) -> None:
        self.handles = {}
        self.listeners: list[Callable[[], None]] = []
        self.restarts: Counter[int] = Counter()  # by process set


_process = _Process()


def begin(world: World) -> None:
    """Begins a world, after `init` has connected."""
    _process.world = world
    restart_counting()
    changed()


def on_change(listener: Callable[[], None]) -> None:
    """Calls a function now, and whenever a world begins or ends, or its process sets or ranks change."""
    _process.listeners.append(listener)
    listener()


def changed() -> None:
    """Notifies the listeners of `on_change`."""
    for listener in _process.listeners:
        listener()


def restart_counting(process_set_id: int = 0) -> None:
    """Restarts counts that must agree on all ranks of a set at 0, at a point that these ranks reach together.

    process_set_id -- the set; 0, that of all ranks, restarts those of all sets
    """
    if process_set_id == 0:
        _process.generation += 1
    else:
        _process.restarts[process_set_id] += 1


def generation(process_set_id: int | None) -> tuple[int, int]:
    """Returns a value that changes when the counts of a process set restart."""
    return _process.generation, _process.restarts[process_set_id or 0]


def end() -> World | None:
    """Ends the world, for `shutdown`, and returns it if there was one. Handle numbers restart."""
    world, _process.world = _process.world, None
    _process.handles.clear()
    _process.handles_made = 0
    changed()
    return world


def is_begun() -> bool:
    """Returns whether there is a world."""
    return _process.world is not None


def current() -> World:
    """Returns the world. Raises ValueError before `init`."""
    if _process.world is None:
        raise ValueError("Horovod has not been initialized; use hvd.init().")
    return _process.world


def handle_of(kind: str | None, in_flight: InFlight) -> int:
    """Returns a handle, a number for `synchronize`, for an operation in flight.

    kind -- for the name of the range around the wait; None if `in_flight.wait` opens that range itself
    """
    number = _process.handles_made
    _process.handles_made += 1
    _process.handles[number] = (kind, in_flight)
    return number


def forget(handle: int) -> None:
    """Drops a handle, for which `synchronize` then returns None."""
    _process.handles.pop(handle, None)


def poll(handle: int) -> bool:
    """Returns whether `synchronize` would return at once. If so, the result of an in-place operation is written.

    Raises ValueError for an invalid handle, or one that was waited for already.
    """
    entry = _process.handles.get(handle)
    if entry is None:
        raise ValueError(f"{handle!r} is no handle of an operation in flight; it may have been synchronized already")
    kind, in_flight = entry
    if not in_flight.poll():
        return False
    if not isinstance(in_flight, _Complete):
        _process.handles[handle] = (kind, _Complete(in_flight))
    return True


def synchronize(handle: int) -> Any:
    """Waits for an operation in flight and returns its result. A second call with the same handle returns None.

    Raises HorovodInternalError if the operation failed, and ValueError if only its output tensor did not fit.
    """
    entry = _process.handles.pop(handle, None)
    if entry is None:
        return None
    kind, in_flight = entry
    return in_flight.wait() if kind is None else wait_for(kind, in_flight)


def wait_for(kind: str, in_flight: InFlight) -> Any:
    """Waits for an operation in flight in a range that `traced` opens, and returns its result."""
    with traced("synchronize", kind):
        return in_flight.wait()


class _Complete:
    """A complete operation: its result or its error, for `synchronize`."""

    def __init__(self, in_flight: InFlight) -> None:
        self._result: Any = None
        self._error: Exception | None = None
        try:
            self._result = in_flight.wait()
        except Exception as error:
            self._error = error

    def poll(self) -> bool:
        return True

    def wait(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


def traced(kind: str, name: str | None) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that `torch.profiler` records if a profiler is active, and NVTX if its ranges are on."""
    torch: Any = sys.modules.get("torch")
    is_profiled = torch is not None and torch.autograd._profiler_enabled()
    opened = nvtx.load()
    if not is_profiled and opened is None:
        return _UNTRACED
    text = f"ronde::{kind}" if name is None else f"ronde::{kind}.{name}"
    contexts = contextlib.ExitStack()
    if is_profiled:
        contexts.enter_context(torch.profiler.record_function(text))
    if opened is not None:
        contexts.enter_context(nvtx.pushed(opened, text))
    return contexts


_UNTRACED = contextlib.nullcontext()
