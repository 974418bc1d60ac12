"""The backend "RONDE" of `ray.util.collective`: groups of Ray's actors that communicate through ronde.

    from ray.util import collective
    from ronde.ray.collective import create_collective_group

    create_collective_group(actors)                    # in the driver: sidecars, and the group "default"
    collective.allreduce(tensor)                       # in each actor, as with Ray's own backends

Ray's backends reach their peers over plaintext. These groups have one sidecar on each node, as the workers of
`RayExecutor` do, and need the same credentials on several nodes.
"""

from __future__ import annotations

import collections
import functools
import os
import threading
import uuid
import zlib
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import numpy
import ray
from ray.util import collective
from ray.util.collective import types
from ray.util.collective.backend_registry import register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup

from ronde import own_sidecar
from ronde.cluster import sidecars
from ronde.cluster.credentials import named
from ronde.cluster.layout import Layout
from ronde.cluster.planning import Options
from ronde.errors import RondeError
from ronde.frameworks import basics
from ronde.ops import Max, Min, Product, Sum
from ronde.ray import job
from ronde.ray.settings import MiniSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.handle import Handle
    from ronde.process_set import ProcessSet

BACKEND = "RONDE"
_OPERATIONS = {
    types.ReduceOp.SUM: Sum,
    types.ReduceOp.PRODUCT: Product,
    types.ReduceOp.MIN: Min,
    types.ReduceOp.MAX: Max,
}
# What `sidecars.join` sets; an actor has a job while it has these.
_OF_JOB = ("RONDE_JOB", "RONDE_SOCKET", "RONDE_RANK")
# The job's ranks of the groups that the driver has declared in this actor, by group.
_declared: dict[str, tuple[int, ...]] = {}
# The tags of this process's groups, by group.
_tags: dict[str, int] = {}
# The calls of `create_collective_group` that have made this process's groups, by group.
_attempts: dict[str, str] = {}
# Tags of groups begin here. Programs that use `ronde.Client.send` in the same actor have those below.
_FIRST_TAG = 2**31


class _Membership(NamedTuple):
    job: str
    rank: int


class GroupCalls:
    """The names of a group's operations, which are those of no other group and of no operation without a name.

    Each kind of operation has its own count: a group's calls of one kind are in the same order on all ranks, those of
    different kinds or groups need not be. A call that is refused before it is submitted does not count.
    """

    def __init__(self, group_name: str) -> None:
        self._group_name = group_name
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()

    def start(self, kind: str, submit: Callable[[str], Handle]) -> Handle:
        """Submits an operation by its name."""
        with self._lock:
            handle = submit(f"ray.{self._group_name}.{kind}.{self._counts[kind]}")
            self._counts[kind] += 1
        return handle


def tag_of(group_name: str, others: dict[str, int]) -> int:
    """Returns the tag of a group's messages, which all ranks compute alike.

    others -- the tags of this process's other groups. Raises RondeError with cause "settings" if one of them is equal.
    """
    tag = _FIRST_TAG | zlib.crc32(group_name.encode())
    for name, other in others.items():
        if other == tag and name != group_name:
            raise RondeError(
                f"the groups {name!r} and {group_name!r} would have the same tag, {tag}, so that their messages could "
                "be mixed up: give one of them another name",
                "settings",
            )
    return tag


def register() -> None:
    """Registers the backend in this process. Does nothing if it is registered."""
    if not collective.collective._global_registry.is_registered(BACKEND):
        register_collective_backend(BACKEND, RondeGroup)


class RondeGroup(BaseGroup):  # type: ignore[misc]
    """A group of actors; Ray makes it.

    Its members are ranks of one job: those that `create_collective_group` has given it, else all ranks of this
    process's job in their order, as in the workers of `RayExecutor`. Tensors are NumPy arrays or PyTorch tensors of the
    same type and shape on all ranks, and results are written to them, as with Ray's own backends.

    Raises RondeError with cause "settings" if this process is in no job, or the group is not that job's.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        if not basics.is_initialized() and not all(name in os.environ for name in _OF_JOB):
            raise RondeError(
                f"the group {group_name!r} has {world_size} ranks, but this actor is in no job of ronde, so it would "
                "communicate with nobody: let the driver make the group by ronde.ray.collective."
                "create_collective_group(actors), which starts the sidecars (docs/RAY.md)",
                "settings",
            )
        basics.init()
        self._client = basics.client()
        members = _declared.get(group_name, tuple(range(self._client.size)))
        if len(members) != world_size or members[rank] != self._client.rank:
            raise RondeError(
                f"rank {rank} of the group {group_name!r} of {world_size} is rank {self._client.rank} of "
                f"{self._client.size} of its job: only a group of all ranks in their order can be made without the "
                "driver. Make others by ronde.ray.collective.create_collective_group(actors, ranks)",
                "settings",
            )
        self._tag = tag_of(group_name, _tags)
        # The job's ranks by the group's, and the group's by their place in results, which is that of the job's ranks.
        self._members = members
        self._order = sorted(range(world_size), key=members.__getitem__)
        self._set: ProcessSet | None = None
        if world_size != self._client.size:
            self._set = self._client.add_process_set(members, members_only=True)
        self._calls = GroupCalls(group_name)
        _tags[group_name] = self._tag

    @classmethod
    def backend(cls) -> str:
        """Returns the name of the backend."""
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Returns True: what it needs has been imported with this module."""
        return True

    def destroy_group(self) -> None:
        """Forgets the group. The session and the sidecars remain until `shutdown`, or until the actors end."""
        _declared.pop(self.group_name, None)
        _tags.pop(self.group_name, None)
        _attempts.pop(self.group_name, None)

    def allreduce(self, tensor: list[Any], allreduce_options: Any = types.AllReduceOptions) -> None:
        """Reduces the tensors of all ranks; each gets the result."""
        own = _single(tensor)
        operation = _OPERATIONS[allreduce_options.reduceOp]
        _write(own, self._run("allreduce", self._client.allreduce_async, _detached(own), operation))

    def barrier(self, barrier_options: Any = types.BarrierOptions) -> None:
        """Returns when all ranks have called it."""
        del barrier_options
        self._run("barrier", self._client.barrier_async)

    def reduce(self, tensor: list[Any], reduce_options: Any = types.ReduceOptions) -> None:
        """Reduces the tensors of all ranks; the root gets the result."""
        own, root = _single(tensor), self._members[reduce_options.root_rank]
        operation = _OPERATIONS[reduce_options.reduceOp]
        result = self._run("reduce", self._client.reduce_async, _detached(own), root, operation)
        if result is not None:
            _write(own, result)

    def broadcast(self, tensor: list[Any], broadcast_options: Any = types.BroadcastOptions) -> None:
        """Gives all ranks the tensor of the root."""
        own, root = _single(tensor), self._members[broadcast_options.root_rank]
        result = self._run("broadcast", self._client.broadcast_async, _detached(own), root)
        if self._client.rank != root:
            _write(own, result)

    def allgather(
        self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any = types.AllGatherOptions
    ) -> None:
        """Gives all ranks the tensors of all ranks, in their order."""
        del allgather_options
        targets, own = _single(tensor_list), _detached(_single(tensor))
        self._check_count(targets)
        rows = self._run("allgather", self._client.allgather_async, own[None])
        for rank, row in zip(self._order, rows):
            _write(targets[rank], row)

    def reducescatter(
        self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any = types.ReduceScatterOptions
    ) -> None:
        """Reduces the lists of all ranks tensor by tensor; rank r gets the r-th result."""
        target, given = _single(tensor), _single(tensor_list)
        self._check_count(given)
        rows = _stacked([_detached(given[rank]) for rank in self._order])
        operation = _OPERATIONS[reducescatter_options.reduceOp]
        _write(target, self._run("reducescatter", self._client.reduce_scatter_async, rows, operation)[0])

    def send(self, tensor: list[Any], send_options: Any) -> None:
        """Sends the tensor to a rank, which calls `recv`."""
        own, to = _detached(_single(tensor)), self._members[send_options.dst_rank]
        self._client.send(own, to, self._tag, process_set=self._set)

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        """Receives the tensor that a rank sends. Raises ValueError if it has another type or shape."""
        own, source = _single(tensor), self._members[recv_options.src_rank]
        _write(own, self._client.recv(source, self._tag, like=_detached(own), process_set=self._set))

    def _run(self, kind: str, submit: Callable[..., Handle], *arguments: Any) -> Any:
        return self._calls.start(kind, lambda name: submit(*arguments, name=name, process_set=self._set)).wait()

    def _check_count(self, given: Sequence[Any]) -> None:
        if len(given) != self.world_size:
            raise ValueError(f"the list has {len(given)} tensors; it has one for each of the {self.world_size} ranks")


def create_collective_group(
    actors: Sequence[Any],
    ranks: Sequence[int] | None = None,
    group_name: str = "default",
    settings: MiniSettings | None = None,
) -> None:
    """Makes a group of actors; called in the driver, in place of Ray's function of this name.

    actors     -- handles of actors of any class. Either all of them are in one job of ronde, for example because a
                  group has been made of all of them before, or none is: then a job begins, with a sidecar on each node.
    ranks      -- the rank of each actor in the group; default: in the order of `actors`
    group_name -- for the functions of `ray.util.collective`
    settings   -- from `RayExecutor.create_settings`: how long to wait, and the credentials of several nodes

    A sidecar ends with the actor that started it, the first one on its node. Raises ValueError for ranks that are not
    0 to N-1, RondeError for actors of several jobs, and what `RayExecutor.start` does; then no new job is left, and no
    part of the group in a job that there was before.
    """
    given = settings or MiniSettings()
    numbers = list(range(len(actors))) if ranks is None else list(ranks)
    if sorted(numbers) != list(range(len(actors))) or not actors:
        raise ValueError(f"the ranks of {len(actors)} actors are 0 to {len(actors) - 1} in some order, not {numbers}")
    register()
    by_rank = [actors[numbers.index(rank)] for rank in range(len(actors))]
    call = functools.partial(_call, by_rank)
    timeout = given.timeout_s + own_sidecar.START_TIMEOUT_S
    found = _gathered(call, len(actors), timeout, _membership)
    is_new, attempt = not any(found), uuid.uuid4().hex
    try:
        if is_new:
            layout = Layout(job.places(call, len(actors), timeout))
            credentials = named(given.certs, given.job_secret_file)
            job.begin(call, layout, Options(given.timeout_s, credentials, given.interfaces()))
            members = tuple(range(len(actors)))
        else:
            members = _members(found)
        _gathered(call, len(actors), timeout, _initialize, len(actors), group_name, members, attempt)
    except BaseException:
        if is_new:
            shutdown(actors, given.timeout_s)
        else:
            _on_all(actors, given.timeout_s, _forget, group_name, attempt)
        raise


def shutdown(actors: Sequence[Any], timeout_s: float = 30) -> None:
    """Ends the job of actors that `create_collective_group` began, with its sidecars.

    timeout_s -- after which actors that are busy are left as they are; those that have ended are ignored
    """
    _on_all(actors, timeout_s, _leave)


def _on_all(actors: Sequence[Any], timeout_s: float, func: Callable[..., Any], *arguments: Any) -> None:
    """Calls a function in all actors. Those that are busy do it when they can, without being waited for any longer."""
    calls = [_call(actors, index, func, *arguments) for index in range(len(actors))]
    ray.wait(calls, num_returns=len(calls), timeout=timeout_s)


def _call(actors: Sequence[Any], index: int, func: Callable[..., Any], *arguments: Any) -> Any:
    return actors[index].__ray_call__.remote(functools.partial(_without_self, func), *arguments)


def _without_self(func: Callable[..., Any], actor: Any, *arguments: Any) -> Any:
    del actor
    return func(*arguments)


def _gathered(call: job.Caller, count: int, timeout: float, func: Callable[..., Any], *arguments: Any) -> list[Any]:
    references = [call(rank, func, rank, *arguments) for rank in range(count)]
    return job.gathered(references, timeout, "have not answered", lambda rank: f"the actor of rank {rank}")


def _membership(rank: int) -> _Membership | None:
    del rank
    if not all(name in os.environ for name in _OF_JOB):
        return None
    return _Membership(os.environ["RONDE_JOB"], int(os.environ["RONDE_RANK"]))


def _members(found: Sequence[_Membership | None]) -> tuple[int, ...]:
    """Returns the job's ranks of a group's ranks. Raises RondeError unless all are different ranks of one job."""
    present = [each for each in found if each is not None]
    if len(set(present)) < len(found) or len({each.job for each in present}) > 1:
        described = "; ".join(
            f"rank {rank}: {'no job' if each is None else f'rank {each.rank} of job {each.job}'}"
            for rank, each in enumerate(found)
        )
        raise RondeError(
            f"the actors of a group are different ranks of one job, or in no job yet, but these are not: {described}. "
            "Make the first group of all actors, and further ones of some of them; ronde.ray.collective.shutdown ends "
            "a job",
            "settings",
        )
    return tuple(each.rank for each in present)


def _initialize(rank: int, size: int, group_name: str, members: tuple[int, ...], attempt: str) -> None:
    register()
    if collective.is_group_initialized(group_name):
        raise RondeError(
            f"this actor is in a group {group_name!r} already: give the new one another name, or destroy that one in "
            "all of its actors by ray.util.collective.destroy_collective_group",
            "settings",
        )
    _declared[group_name] = members
    try:
        collective.init_collective_group(size, rank, BACKEND, group_name)
    except BaseException:
        _declared.pop(group_name, None)
        raise
    _attempts[group_name] = attempt


def _forget(group_name: str, attempt: str) -> None:
    """Destroys the group, but not one of the same name that another call has made."""
    if _attempts.get(group_name) == attempt:
        collective.destroy_collective_group(group_name)


def _leave() -> None:
    for name in list(_tags):
        collective.destroy_collective_group(name)
    try:
        sidecars.leave()
    finally:
        for name in _OF_JOB:
            os.environ.pop(name, None)


def _single(given: Sequence[Any]) -> Any:
    if len(given) != 1:
        raise ValueError(f"{len(given)} tensors of one process are given; ronde has one for each rank")
    return given[0]


def _detached(tensor: Any) -> Any:
    """Returns the tensor without its gradient. Raises TypeError for other libraries' arrays."""
    if isinstance(tensor, numpy.ndarray):
        return tensor
    if hasattr(tensor, "detach"):
        return tensor.detach()
    raise TypeError(f"{type(tensor).__name__} is no NumPy array and no PyTorch tensor; convert it by torch.as_tensor")


def _stacked(tensors: Sequence[Any]) -> Any:
    if isinstance(tensors[0], numpy.ndarray):
        return numpy.stack(tensors)
    import torch

    return torch.stack(list(tensors))


def _write(target: Any, value: Any) -> None:
    """Copies a result into the caller's tensor, which may be strided. Raises ValueError if it does not fit."""
    if tuple(target.shape) != tuple(value.shape):
        raise ValueError(f"the result has the shape {tuple(value.shape)}, the tensor for it {tuple(target.shape)}")
    if isinstance(target, numpy.ndarray):
        result = numpy.asarray(value)
        if result.dtype != target.dtype:
            raise ValueError(f"the result has the type {result.dtype}, the array for it {target.dtype}")
        target[...] = result
        return
    import torch

    received = torch.as_tensor(value)
    if received.dtype != target.dtype:
        raise ValueError(f"the result has the type {received.dtype}, the tensor for it {target.dtype}")
    with torch.no_grad():
        target.copy_(received)
