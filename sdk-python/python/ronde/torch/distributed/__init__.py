"""`torch.distributed` on ronde: the backend "ronde", and a hook for DistributedDataParallel.

Importing this module registers the backend. Workers need no network access for it:

    import ronde.torch.distributed
    ronde.torch.distributed.init_process_group()            # or, through torch.distributed:
    torch.distributed.init_process_group("ronde", init_method="ronde://")

Ranks are those of `ronde run`. Everything else is PyTorch's: DistributedDataParallel, `torch.distributed.all_reduce`
and other collectives, also on tensors of GPUs, through main memory. Functions of `ronde.torch` may be used, too.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import sys
from typing import TYPE_CHECKING, Any, Callable, cast

import torch
import torch.distributed
from torch._C._distributed_c10d import GradBucket, HashStore
from torch.distributed.constants import default_pg_timeout

import ronde.torch.basics
import ronde_entry_points
from ronde.errors import RondeError
from ronde.ops import Average
from ronde.submission import read_tensor, reduction
from ronde.tensors import source_of
from ronde.torch.distributed import hooks
from ronde.torch.distributed.group import Group, Ranks
from ronde.torch.distributed.progress import Completer, Lane
from ronde.torch.distributed.work import Call, Operation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ronde.client import Client
    from ronde.handle import Handle
    from ronde.plugins import Plugin
    from ronde.process_set import ProcessSet

__all__ = ["init_process_group", "new_group", "register_groups", "register_hook", "register_mesh"]


# How long a rank that is done waits for the others, whose operations the end of the session would fail.
LEAVE_TIMEOUT_S = 30.0


class _Groups:
    """The groups of this process. PyTorch's own objects do not keep them alive."""

    def __init__(self, client: Client, is_session_ours: bool) -> None:
        self.client = client
        self._is_session_ours = is_session_ours
        self.completer = Completer(client.completions())
        self.sets: dict[tuple[int, ...], ProcessSet] = {tuple(range(client.size)): client.global_process_set}
        self.alive: list[Group] = []
        self.hooks = 0
        self._made: dict[tuple[int, ...], int] = {}

    def register(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Registers groups on all ranks of the job."""
        for ranks in groups:
            if ranks not in self.sets:
                self.sets[ranks] = self.client.add_process_set(ranks)

    def make(self, ranks: tuple[int, ...], options: Any) -> Group:
        """Makes another group of these ranks. Raises ValueError if they are not registered."""
        members = self.sets.get(ranks)
        if members is None:
            raise ValueError(
                f"the ranks {list(ranks)} are not registered as a group of the backend ronde; call new_group, "
                "register_groups or register_mesh of ronde.torch.distributed before, on all ranks of the job"
            )
        number = self._made[ranks] = self._made.get(ranks, -1) + 1
        ranks_of_it, label = Ranks(self.client, members), f"c10d.{number}"
        group = Group(ranks_of_it, options.group_id, label, options.timeout, self.completer, self._leave)
        self.alive.append(group)
        return group

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


_groups: _Groups | None = None


def init_process_group(
    timeout: datetime.timedelta = default_pg_timeout, *, group_name: str = "", **settings: Any
) -> None:
    """`torch.distributed.init_process_group` with the backend "ronde", for the ranks of this job.

    timeout  -- after which an operation fails on the rank that waits for it, and therefore on all others
    settings -- arguments of `ronde.torch.init`, which this calls unless it was called before

    Raises what `ronde.torch.init` does.
    """
    client = _begun(settings).client
    torch.distributed.init_process_group(
        "ronde",
        store=HashStore(),
        rank=client.rank,
        world_size=client.size,
        timeout=timeout,
        group_name=group_name,
    )


def register_groups(groups: Iterable[Iterable[int]]) -> None:
    """Registers groups of ranks. All ranks of the job must call it, with the same ranks in the same order.

    PyTorch creates a group on its members only, but ronde requires all ranks to agree on a process set before. Does
    nothing for ranks that are registered already. Raises RefusedError for a rank that the job does not have, and
    ValueError before `init_process_group`.
    """
    _require().register(tuple(sorted(ranks)) for ranks in groups)


def register_mesh(sizes: Sequence[int]) -> None:
    """Registers all groups of a mesh, for `torch.distributed.device_mesh.init_device_mesh` with these sizes.

    Raises what `register_groups` does.
    """
    ranks = torch.arange(math.prod(sizes)).reshape(*sizes)
    for dimension, size in enumerate(sizes):
        register_groups(ranks.movedim(dimension, -1).reshape(-1, size).tolist())


def new_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """Registers a group, then calls `torch.distributed.new_group` with the backend "ronde".

    All ranks of the job must call it, with the same ranks.

    ranks   -- ranks of the job; default: all
    options -- further arguments of `torch.distributed.new_group`

    Returns its result. Raises what `register_groups` does.
    """
    wanted = list(range(_require().client.size)) if ranks is None else sorted(ranks)
    register_groups([wanted])
    return torch.distributed.new_group(wanted, backend="ronde", **options)


def register_hook(model: torch.nn.parallel.DistributedDataParallel, codec: Plugin | None = None) -> None:
    """Makes ronde reduce the gradients of a DistributedDataParallel, whatever backend its group of all ranks has.

    In addition to the backend "ronde", it has codecs, and a step that equals the previous one is not negotiated. All
    ranks must call it for their models in the same order, before the first step.

    codec -- encodes gradients between hosts, as `compression` of `DistributedOptimizer` does: a plugin, such as
             `ronde.Plugin("topk", ratio=0.01)`

    Raises what `DistributedDataParallel.register_comm_hook` does, and what `ronde.torch.init` does, which it calls.
    """
    groups = _begun({})
    lane, label = Lane(groups.completer), f"ddp.{groups.hooks}"
    groups.hooks += 1

    def reduce(groups: _Groups, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        name, buffer = f"{label}.bucket.{bucket.index()}", bucket.buffer()

        def start(notify: bool) -> Handle:
            return _start_mean(groups.client, buffer, name, codec, notify)

        call = Call(name, buffer.nbytes, start, lambda mean: [mean])
        operation = Operation(lane, call, default_pg_timeout)
        lane.add(operation, True)
        means = operation.get_future().then(lambda means: means.value()[0])
        return cast("torch.futures.Future[torch.Tensor]", means)

    # PyTorch compares annotations with its own types; these are their names.
    reduce.__annotations__.clear()
    model.register_comm_hook(groups, reduce)


def _matched_by_bucket(
    model: torch.nn.parallel.DistributedDataParallel, hook: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps the hook of a model whose group is ronde's. Returns other hooks unchanged."""
    if _groups is None or not isinstance(model.process_group, Group):
        return hook
    _groups.hooks += 1
    return hooks.by_bucket(hook, f"hook.{_groups.hooks}", _groups.completer, Lane)


def _start_mean(client: Client, buffer: torch.Tensor, name: str, codec: Plugin | None, notify: bool) -> Handle:
    source, options = source_of(buffer), reduction(Average, 1.0, 1.0, codec)
    return client._submit("allreduce", source, name, None, read=read_tensor(source), notify=notify, **options)


def _begun(settings: dict[str, Any]) -> _Groups:
    """Returns the groups of this process, after calling `init` if necessary."""
    global _groups  # noqa: PLW0603
    is_ours = not ronde.torch.basics.is_initialized()
    ronde.torch.basics.init(**settings)
    client = ronde.torch.basics.client()
    if _groups is None or _groups.client is not client:
        _groups = _Groups(client, is_ours)
    return _groups


def _require() -> _Groups:
    if _groups is None:
        raise ValueError(
            "there is no group of the backend ronde yet; call ronde.torch.distributed.init_process_group()"
        )
    return _groups


def _create(options: Any, backend_options: Any) -> Group:
    """Creates a group of the backend; `torch.distributed` calls it."""
    del backend_options
    groups = _begun({})
    client, ranks = groups.client, tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    if options.group_size > client.size or ranks[options.group_rank] != client.rank:
        raise ValueError(
            f"this is to be rank {options.group_rank} of a group of {options.group_size} ranks, but it is rank "
            f"{client.rank} of {client.size} in this job of ronde; start the program by `ronde run -np N`, and leave "
            "ranks and sizes to init_method='ronde://'"
        )
    return groups.make(ranks, options)


def _rendezvous(url: str, **options: Any) -> Iterator[tuple[HashStore, int, int]]:
    """Handles `ronde://`: rank and size are the job's, and no store is shared."""
    del url, options
    client = _begun({}).client
    yield HashStore(), client.rank, client.size


torch.distributed.Backend.register_backend("ronde", _create, extended_api=True, devices=["cpu", "cuda"])
ronde_entry_points.replace_rendezvous(_rendezvous)
hooks.on_registration(_matched_by_bucket)
