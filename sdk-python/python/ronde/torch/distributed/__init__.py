"""`torch.distributed` on ronde: the backend "ronde", and a hook for DistributedDataParallel.

Importing this module registers the backend. Workers need no network access for it:

    import ronde.torch.distributed
    torch.distributed.init_process_group("ronde")

Ranks are those of `ronde run`, or those that PyTorch is given. Everything else is PyTorch's: DistributedDataParallel,
groups, device meshes, `torch.distributed.all_reduce` and other collectives, including on tensors of GPUs, through
main memory. Functions of `ronde.torch` may be used, too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Callable, cast

import torch
import torch.distributed
from torch._C._distributed_c10d import GradBucket
from torch.distributed.constants import default_pg_timeout

from ronde.ops import Average
from ronde.submission import read_tensor, reduction
from ronde.tensors import source_of
from ronde.torch.distributed import creation, env_rendezvous, hooks
from ronde.torch.distributed.group import group_of
from ronde.torch.distributed.groups import Groups
from ronde.torch.distributed.progress import Lane
from ronde.torch.distributed.work import Call, Operation

if TYPE_CHECKING:
    import datetime
    from collections.abc import Iterable, Sequence

    from ronde.client import Client
    from ronde.handle import Handle
    from ronde.plugins import Plugin

__all__ = ["init_process_group", "new_group", "register_groups", "register_hook", "register_mesh"]


def init_process_group(
    timeout: datetime.timedelta = default_pg_timeout, *, group_name: str = "", **settings: Any
) -> None:
    """`torch.distributed.init_process_group` with the backend "ronde", for the ranks of this job.

    timeout  -- after which an operation fails on the rank that waits for it, and therefore on all others
    settings -- arguments of `ronde.torch.init`, which this calls unless it was called before

    Raises what `ronde.torch.init` does.
    """
    client = creation.begun(settings).client
    torch.distributed.init_process_group(
        "ronde",
        store=env_rendezvous.store(client.rank, client.size, timeout=timeout),
        rank=client.rank,
        world_size=client.size,
        timeout=timeout,
        group_name=group_name,
    )


def register_groups(groups: Iterable[Iterable[int]]) -> None:
    """Begins to agree on groups of ranks before PyTorch makes them. This is never necessary.

    Members of a group agree on it by themselves. This function saves the first operation of each group a wait. Ranks
    that are not members need not call it. Raises ValueError for ranks that the job does not have, and before
    `init_process_group`.
    """
    _require().register([tuple(sorted(ranks)) for ranks in groups])


def register_mesh(sizes: Sequence[int]) -> None:
    """Calls `register_groups` with all groups of a mesh of these sizes.

    Raises what `register_groups` does.
    """
    ranks = torch.arange(math.prod(sizes)).reshape(*sizes)
    for dimension, size in enumerate(sizes):
        register_groups(ranks.movedim(dimension, -1).reshape(-1, size).tolist())


def new_group(ranks: Sequence[int] | None = None, **options: Any) -> Any:
    """Calls `torch.distributed.new_group` with the backend "ronde".

    ranks   -- ranks of the job; default: all
    options -- further arguments of `torch.distributed.new_group`

    Returns its result. Raises ValueError before `init_process_group`, and what `torch.distributed.new_group` does.
    """
    _require()
    return torch.distributed.new_group(ranks, backend="ronde", **options)


def register_hook(model: torch.nn.parallel.DistributedDataParallel, codec: Plugin | None = None) -> None:
    """Makes ronde reduce the gradients of a DistributedDataParallel, whatever backend its group of all ranks has.

    The ranks of this group are those of the job. In addition to the backend "ronde", the hook has codecs, and a step
    that equals the previous one is not negotiated. All ranks must call it for their models in the same order, before
    the first step.

    codec -- encodes gradients between hosts, as `compression` of `DistributedOptimizer` does: a plugin, such as
             `ronde.Plugin("topk", ratio=0.01)`

    Raises ValueError for a model whose group has other ranks than the job, what
    `DistributedDataParallel.register_comm_hook` does, and what `ronde.torch.init` does, which it calls.
    """
    groups = creation.begun({})
    _check_has_all_ranks(model, groups.client)
    lane, label = Lane(groups.completer), f"ddp.{groups.averaging_hooks}"
    groups.averaging_hooks += 1

    def reduce(groups: Groups, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
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


def _check_has_all_ranks(model: torch.nn.parallel.DistributedDataParallel, client: Client) -> None:
    """Raises ValueError if the group of a model is not all ranks of the job, over which `register_hook` averages."""
    group = model.process_group
    creation.check_agrees(
        "the group of the DistributedDataParallel has",
        torch.distributed.get_rank(group),
        torch.distributed.get_world_size(group),
        client,
        "register_hook averages over all of them. For some ranks leave it out, and give DistributedDataParallel "
        "process_group=ronde.torch.distributed.new_group(ranks)",
    )


def _matched_by_bucket(
    model: torch.nn.parallel.DistributedDataParallel, hook: Callable[..., Any]
) -> Callable[..., Any]:
    """Wraps the hook of a model whose group is ronde's. Returns other hooks unchanged."""
    group = group_of(model.process_group)
    return hook if group is None else group.by_bucket(hook)


def _start_mean(client: Client, buffer: torch.Tensor, name: str, codec: Plugin | None, notify: bool) -> Handle:
    source, options = source_of(buffer), reduction(Average, 1.0, 1.0, codec)
    return client._submit("allreduce", source, name, None, read=read_tensor(source), notify=notify, **options)


def _require() -> Groups:
    groups = creation.groups()
    if groups is None:
        raise ValueError(
            "there is no group of the backend ronde yet; call torch.distributed.init_process_group('ronde')"
        )
    return groups


creation.register()
hooks.on_registration(_matched_by_bucket)
