"""Run by every rank where there is a GPU: tensors on it work as those in main memory do."""

from __future__ import annotations

import sys

import torch

import ronde.torch as hvd
from ronde.torch.mpi_ops import client


def main() -> None:
    """Collectives, a training step and the memory between."""
    hvd.init()
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    rank, size = hvd.rank(), hvd.size()
    total = float(sum(range(1, size + 1)))
    for elements in (1, 1_000, 1 << 20):
        mine = torch.full((elements,), float(rank + 1), device="cuda")
        result = hvd.allreduce(mine, op=hvd.Sum)
        assert result.is_cuda
        torch.testing.assert_close(result, torch.full_like(mine, total))
        handle = hvd.allreduce_async_(mine, op=hvd.Sum)
        assert hvd.synchronize(handle) is mine
        torch.testing.assert_close(mine, torch.full_like(mine, total))
    gathered = hvd.allgather(torch.full((rank + 1, 2), float(rank), dtype=torch.bfloat16, device="cuda"))
    assert gathered.shape == (sum(range(1, size + 1)), 2)
    root = hvd.broadcast(torch.full((3,), rank, device="cuda"), size - 1)
    torch.testing.assert_close(root, torch.full((3,), size - 1, device="cuda"))
    splits = torch.ones(size, dtype=torch.int32, device="cuda")
    received, counts = hvd.alltoall(torch.full((size, 2), float(rank), device="cuda"), splits=splits)
    assert counts.is_cuda
    torch.testing.assert_close(received[:, 0], torch.arange(float(size), device="cuda"))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), hvd.SyncBatchNorm(8), torch.nn.Linear(8, 1)).cuda()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    segments = 0
    for step in range(5):
        optimizer.zero_grad()
        model(torch.randn(4, 8, device="cuda")).sum().backward()
        optimizer.step()
        torch.cuda.synchronize()
        segments = client().shared_memory.segments if step < 2 else segments
    assert client().shared_memory.segments == segments, "memory is used again"
    for parameter in model.parameters():
        everybodys = hvd.allgather(parameter.detach().reshape(1, -1))
        assert (everybodys == everybodys[0]).all()
    hvd.barrier()
    print(f"rank {rank}: GPUs hold")
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
