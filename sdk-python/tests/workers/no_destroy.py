"""Two ranks train and end without destroy_process_group, one of them later than the other.

no_destroy.py LATE    LATE: the rank that begins its last operation later than the other rank is done
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

dist.init_process_group("ronde")
group = dist.new_group([int(sys.argv[1])])
total = torch.tensor([float(dist.get_rank())])
dist.all_reduce(total)
print("sum", total.item(), flush=True)
if dist.get_rank() == int(sys.argv[1]):
    time.sleep(3)
    dist.all_reduce(total, group=group)
    assert total.item() == 1.0
