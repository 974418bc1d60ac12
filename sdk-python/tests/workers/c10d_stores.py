"""Run by every rank without a launcher of ronde: PyTorch's own means make the ranks meet.

c10d_stores.py RANK SIZE INIT_METHOD BACKEND
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

import ronde.torch.distributed
from ronde.torch.distributed.group import group_of

rank, size, method, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
if method == "env://":
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group(backend)
else:
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=size)
assert group_of(dist.group.WORLD) is not None
assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
total = torch.tensor([float(rank)])
dist.all_reduce(total)
assert total.item() == sum(range(size))
dist.destroy_process_group()
assert not ronde.torch.is_initialized()
print("the ranks have met")
