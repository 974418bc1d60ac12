"""A worker of torchrun: trains a small model with DistributedDataParallel and reports what the test compares.

torchrun_ddp.py [--fail-once RANK] [--seconds S] [--hvd] [--mark FOLDER]

--fail-once -- this rank ends with status 3 at the first start, in the middle of the training
--seconds   -- goes on for that long, so that the test can read the sockets of all processes
--hvd       -- trains with horovod.torch instead
--mark      -- makes a file for this rank in this folder when it trains
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pathlib
import sys
import time

from listening import Watch

watch = Watch()
watch.start()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--fail-once", type=int, default=-1)
parser.add_argument("--seconds", type=float, default=0)
parser.add_argument("--hvd", action="store_true")
parser.add_argument("--mark", type=pathlib.Path)
options = parser.parse_args()
restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
torch.set_num_threads(1)
torch.manual_seed(int(os.environ["RANK"]))
model: torch.nn.Module = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if options.hvd:
    import horovod.torch as hvd

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    assert (hvd.local_rank(), hvd.local_size()) == (int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
else:
    dist.init_process_group("ronde")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(model)
assert (rank, size) == (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))


def vote_to_stop(is_late: bool) -> bool:
    """All ranks make the same number of steps."""
    votes = torch.tensor([float(is_late)])
    if options.hvd:
        return bool(hvd.allreduce(votes, name="late", op=hvd.Sum) > 0)
    dist.all_reduce(votes)
    return bool(votes > 0)


begun, step = time.monotonic(), 0
while True:
    optimizer.zero_grad()
    rows = torch.randn(16, 8)
    torch.nn.functional.mse_loss(model(rows), rows[:, :4]).backward()
    optimizer.step()
    step += 1
    if step == 5 and options.mark is not None:
        (options.mark / f"rank-{rank}").touch()
    if step == 5 and restarts == 0 and rank == options.fail_once:
        os._exit(3)
    if vote_to_stop(step >= 10 and time.monotonic() - begun >= options.seconds):
        break
weights = torch.cat([value.detach().flatten() for value in model.parameters()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
if options.hvd:
    hvd.shutdown()
else:
    dist.destroy_process_group()
watch.stop()
# In one piece: other ranks write to the same output.
sys.stdout.write(f"rank {rank} of {size}, start {restarts}: weights {digest}, {len(watch.ports)} TCP listeners\n")
