"""Run by every rank: DistributedDataParallel on the backend "ronde" trains as one process with all ranks' data does."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import ronde
import ronde.torch.distributed

STEPS, ROWS = 6, 16


def model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 200), torch.nn.Tanh(), torch.nn.Linear(200, 100), torch.nn.Linear(100, 4)
    )


def rows(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randn(ROWS, 32, generator=torch.Generator().manual_seed(1_000 * rank + step))
    return made, made[:, :4].cumsum(1)


def train(trained: torch.nn.Module, ranks: list[int]) -> torch.Tensor:
    """All parameters after some steps with these ranks' data."""
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.05, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        parts = [rows(rank, step) for rank in ranks]
        inputs, targets = (torch.cat(part) for part in zip(*parts))
        torch.nn.functional.mse_loss(trained(inputs), targets).backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in trained.parameters()])


def check(what: str, want: torch.Tensor, got: torch.Tensor, tolerance: float) -> None:
    everybodys = [torch.empty_like(got) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, got)
    assert all(torch.equal(other, got) for other in everybodys), f"{what}: ranks differ"
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


ronde.torch.distributed.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
want = train(model(), list(range(size)))
for options in ({}, {"gradient_as_bucket_view": True}, {"static_graph": True}, {"find_unused_parameters": True}):
    for hooked in (False, True):
        parallel: Any = DistributedDataParallel(model(), bucket_cap_mb=0.03, **options)
        if hooked:
            ronde.torch.distributed.register_hook(parallel)
        check(f"{options}, {hooked}", want, train(parallel, [rank]), 1e-5)
coded: Any = DistributedDataParallel(model())
ronde.torch.distributed.register_hook(coded, codec=ronde.Plugin("bf16"))
check("bf16", want, train(coded, [rank]), 2e-2)
# Ranks that begin with other weights have those of rank 0 then.
torch.manual_seed(rank)
begun = DistributedDataParallel(torch.nn.Linear(3, 2)).module.weight.detach()
other = begun.clone()
dist.broadcast(other, 0)
assert torch.equal(begun, other)
dist.destroy_process_group()
print("the same as one process")
sys.stdout.flush()
