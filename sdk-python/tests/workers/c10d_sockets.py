"""Run by every rank: training over PyTorch's default rendezvous opens no socket of the network in a worker."""

from __future__ import annotations

import os
import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ronde.torch.distributed.group import CAN_EXTEND_BACKEND


def network_sockets() -> list[str]:
    """The TCP and UDP sockets of this process, as the kernel lists them."""
    mine = set()
    for link in pathlib.Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(link)
        except FileNotFoundError:  # the descriptor that lists the folder
            continue
        if target.startswith("socket:["):
            mine.add(target[len("socket:[") : -1])
    lines = [
        line
        for table in ("tcp", "tcp6", "udp", "udp6")
        for line in pathlib.Path("/proc/self/net", table).read_text().splitlines()[1:]
    ]
    return [line for line in lines if line.split()[9] in mine]


def train() -> None:
    for wrap in (torch.nn.parallel.DistributedDataParallel, fully_shard):
        model = torch.nn.Linear(4, 2)
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        wrapped = wrap(model)
        wrapped(torch.ones(2, 4)).sum().backward()


assert {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"} <= set(os.environ), (
    "the launcher sets what PyTorch asks for"
)
dist.init_process_group("ronde")
train()
pair = dist.new_group([0, 1])
dist.barrier(pair)
objects = [None] * dist.get_world_size()
dist.all_gather_object(objects, "object")
if CAN_EXTEND_BACKEND:
    dist.split_group(split_ranks=[[0, 1]])
    whole = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.shrink_group([1], whole)
assert network_sockets() == [], network_sockets()
dist.destroy_process_group()
if sys.argv[1:] == ["gloo"]:
    # The same default in the same process gives another backend its store.
    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == dist.get_world_size()
    assert network_sockets()
    dist.destroy_process_group()
print("no socket of the network")
