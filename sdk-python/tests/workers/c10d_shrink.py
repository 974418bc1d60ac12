"""Ranks that no launcher watches continue with `shrink_group` when others die, or are left out. Needs PyTorch 2.15.

c10d_shrink.py CASE RANK SIZE STORE_FILE
"""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import SHRINK_ABORT

import ronde
import ronde.torch.distributed
from ronde.torch.distributed.group import group_of

CASE, RANK, SIZE, STORE = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
TIMEOUT = datetime.timedelta(seconds=60)
STEPS, RATE = 4, 0.05


def gradient(weights: torch.Tensor, worker: int, step: int) -> torch.Tensor:
    """The gradient of a worker's own rows in a step. Integers: sums do not depend on their order."""
    rows = torch.arange(12, dtype=torch.float64).reshape(3, 4) % (worker + 2) + step
    return rows.T @ (rows @ weights).round()


def trained_alone(phases: list[list[int]]) -> torch.Tensor:
    """What one process computes for the workers of each phase."""
    weights = torch.ones(4, dtype=torch.float64)
    for phase, workers in enumerate(phases):
        for step in range(STEPS):
            total = sum(gradient(weights, worker, phase * STEPS + step) for worker in workers)
            weights -= (RATE * total / len(workers)).round()
    return weights


def train(weights: torch.Tensor, phase: int, group: dist.ProcessGroup | None = None) -> None:
    for step in range(STEPS):
        total = gradient(weights, RANK, phase * STEPS + step)
        dist.all_reduce(total, group=group)
        weights -= (RATE * total / dist.get_world_size(group)).round()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def until_lost(group: dist.ProcessGroup | None = None) -> None:
    """Calls collectives until one fails, because a rank is gone."""
    try:
        while True:
            dist.all_reduce(torch.ones(1), group=group)
    except ronde.RondeError as error:
        print(f"rank {RANK} lost the others: {error}", flush=True)


def check_numbers(left: list[int]) -> None:
    """Ranks are numbered from 0 again, and so are those of later groups."""
    me = left.index(RANK)
    assert (dist.get_rank(), dist.get_world_size()) == (me, len(left))
    sent = torch.tensor([RANK])
    dist.broadcast(sent, src=len(left) - 1)
    assert sent.item() == left[-1]
    group = dist.new_group([0, len(left) - 1])
    if me in (0, len(left) - 1):
        total = torch.tensor([RANK])
        dist.all_reduce(total, group=group)
        assert total.item() == left[0] + left[-1]
    # A rank that dies next must not do so while others are in the group's operation.
    dist.barrier()


def dead_ranks() -> None:
    """Two of five ranks die one after another, the first of them rank 0, which has started the sidecar."""
    weights = torch.ones(4, dtype=torch.float64)
    train(weights, 0)
    if RANK == 0:
        die()
    until_lost()
    dist.shrink_group([0])
    train(weights, 1)
    check_numbers([1, 2, 3, 4])
    if RANK == 3:
        die()
    until_lost()
    dist.shrink_group([2], shrink_flags=SHRINK_ABORT)
    train(weights, 2)
    check_numbers([1, 2, 4])
    assert torch.equal(weights, trained_alone([[0, 1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 4]])), weights
    dist.barrier()


def dead_member() -> None:
    """A group that is not the default one continues without its dead member."""
    group = dist.new_group([0, 1, 2])
    weights = torch.ones(4, dtype=torch.float64)
    if RANK < 3:
        train(weights, 0, group)
    dist.barrier()
    if RANK == 1:
        die()
    until_lost()
    if RANK in (0, 2):
        left = dist.shrink_group([1], group)
        train(weights, 1, left)
        assert torch.equal(weights, trained_alone([[0, 1, 2], [0, 2]]))
        dist.barrier(left)


def left_out() -> None:
    """Rank 1 lives on, and has the session for itself and the others until all have left."""
    weights = torch.ones(4, dtype=torch.float64)
    train(weights, 0)
    if RANK != 1:
        dist.shrink_group([1])
        train(weights, 1)
        check_numbers([0, 2, 3])
        assert torch.equal(weights, trained_alone([[0, 1, 2, 3], [0, 2, 3]]))


def aborted() -> None:
    """With SHRINK_ABORT the others leave rank 1, whose operations fail."""
    weights = torch.ones(4, dtype=torch.float64)
    train(weights, 0)
    if RANK == 1:
        until_lost()
        return
    dist.shrink_group([1], shrink_flags=SHRINK_ABORT)
    train(weights, 1)
    assert torch.equal(weights, trained_alone([[0, 1, 2, 3], [0, 2, 3]]))
    dist.barrier()


def missing() -> None:
    """A survivor that does not call shrink_group is named."""
    dist.barrier()
    if RANK == 1:
        die()
    until_lost()
    if RANK == 2:
        time.sleep(1000)  # until the test ends it
    options = group_of(dist.group.WORLD).options
    options._timeout = datetime.timedelta(seconds=3)
    try:
        dist.shrink_group([1], pg_options=options)
    except ronde.TimedOutError as error:
        print(f"nobody came: {error}", flush=True)


dist.init_process_group("ronde", init_method=f"file://{STORE}", rank=RANK, world_size=SIZE, timeout=TIMEOUT)
{each.__name__: each for each in (dead_ranks, dead_member, left_out, aborted, missing)}[CASE]()
if dist.is_initialized():
    dist.destroy_process_group()
print(f"rank {RANK} is done", flush=True)
