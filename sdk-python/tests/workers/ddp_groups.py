"""Communication hooks of models whose groups are some ranks of the job, or no ranks of it. Run by every rank.

ddp_groups.py                      in a job: models of groups of some ranks, and one of all ranks
ddp_groups.py RANK SIZE METHOD     without a launcher, as a program of torch.multiprocessing: Gloo joins the ranks
"""

from __future__ import annotations

import datetime
import sys
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ronde.torch.distributed


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("nothing was raised")


def averages(state, bucket):  # PyTorch takes annotations for types, and these would be texts
    return dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, state, async_op=True).get_future().then(first)


def first(future: Any) -> torch.Tensor:
    return future.value()[0]


def hooked(group: Any) -> Any:
    """A model of a group, with a hook of its own."""
    model = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False), process_group=group)
    model.register_comm_hook(group, averages)
    return model


def check_mean(model: Any, ranks: list[int]) -> None:
    model(torch.full((1, 3), float(rank))).sum().backward()
    found = model.module.weight.grad
    torch.testing.assert_close(found, torch.full((1, 3), sum(ranks) / len(ranks)))


def in_a_job() -> None:
    """The ranks have different numbers of groups, and of models with hooks, before the model of all ranks."""
    some = list(range(size - 1))
    groups = [ronde.torch.distributed.new_group(ranks) for ranks in (some, [size - 1])]
    mine, members = (groups[0], some) if rank in some else (groups[1], [size - 1])
    models = [hooked(mine) for _ in range(1 + 2 * (rank == size - 1))]
    for model in [*models, hooked(mine)]:
        check_mean(model, members)
    whole = DistributedDataParallel(torch.nn.Linear(3, 1, bias=False))
    text = refused(lambda: ronde.torch.distributed.register_hook(models[0]))
    assert f"world size {len(members)}, but {size} in the job of ronde" in text, text
    assert "process_group=ronde.torch.distributed.new_group(ranks)" in text, text
    assert "no launcher" not in text, text
    ronde.torch.distributed.register_hook(whole)
    check_mean(whole, list(range(size)))
    check_mean(hooked(dist.group.WORLD), list(range(size)))


def without_a_launcher() -> None:
    """Each process is a job of one rank, in which it would train alone."""
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    text = refused(lambda: ronde.torch.distributed.register_hook(model))
    assert f"the group of the DistributedDataParallel has {'rank 1, but 0' if rank else 'world size'}" in text, text
    assert "start the ranks with `ronde run -np N`" in text, text
    text = refused(lambda: dist.new_group([0, 1], backend="ronde"))
    assert "the default group of torch.distributed has" in text, text
    assert f"world size {size}, but 1 in the job of ronde" in text, text
    assert "start the ranks with `ronde run -np N`" in text, text


if sys.argv[1:]:
    rank, size = int(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=size)
    without_a_launcher()
else:
    ronde.torch.distributed.init_process_group(datetime.timedelta(seconds=30))
    rank, size = dist.get_rank(), dist.get_world_size()
    in_a_job()
dist.destroy_process_group()
print("hooks are those of their groups", flush=True)
