"""Groups of Gloo beside a default group of ronde, of which rank 0 is no member. Run by three ranks, by the name alone.

mixed_groups.py [local]    local: PyTorch's use_local_synchronization, with which only members need to call
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

dist.init_process_group("ronde")
rank = dist.get_rank()
lazy = sys.modules["ronde.torch.distributed.lazy_store"].LazyStore
assert [store.is_open() for store in lazy._alive] == [False]
dist.new_group([0, 1])
assert [store.is_open() for store in lazy._alive] == [False], "a group of ronde needs no store"
is_local = "local" in sys.argv
group = dist.new_group([1, 2], backend="gloo", use_local_synchronization=is_local)
if rank != 0:
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=group)
    assert total.item() == 3.0
if not is_local:  # after a local group, PyTorch names later groups differently on ranks that are no members of it
    both = dist.new_group(backend="cpu:gloo")
    total = torch.tensor([float(rank)])
    dist.all_reduce(total, group=both)
    assert total.item() == 3.0
dist.destroy_process_group()
assert lazy._alive == [], "the store of a group that has ended stays open"
print("gloo beside ronde")
