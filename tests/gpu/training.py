"""Run by each of two ranks: DDP on ronde and `DistributedOptimizer` train as one process with all the data does.

python training.py DEVICE, which is "cuda" or, to try the script, "cpu"
"""

from __future__ import annotations

import sys

import ronde.torch as hvd
import ronde.torch.distributed  # noqa: F401  registers the backend
import torch
import torch.distributed

STEPS = 5
BATCH = 16


def model(device: torch.device) -> torch.nn.Module:
    """The same weights in each process."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).to(device)


def data(device: torch.device, size: int) -> torch.Tensor:
    """All ranks' inputs of all steps."""
    return torch.randn(STEPS, size * BATCH, 64, generator=torch.Generator().manual_seed(2)).to(device)


def train(net: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor) -> list[torch.Tensor]:
    """Trains, and returns the weights."""
    for batch in inputs:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


def main() -> None:
    """Trains in three ways, and compares."""
    kind = sys.argv[1]
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if kind == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    everything = data(device, size)
    mine = everything[:, rank * BATCH : (rank + 1) * BATCH]
    alone = model(device)
    expected = train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), everything)
    net = model(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=net.named_parameters())
    for found, right in zip(train(net, optimizer, mine), expected):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    hvd.shutdown()
    torch.distributed.init_process_group("ronde")
    net = model(device)
    ddp = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.05)
    for found, right in zip(train(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), mine), expected):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    torch.distributed.destroy_process_group()
    print(f"rank {rank}: the same as one process")


if __name__ == "__main__":
    main()
