"""Run by every rank with RONDE_HIERARCHICAL_ADASUM=1: hosts are averaged, then combined by Adasum."""

from __future__ import annotations

import sys

import torch

import ronde.torch as hvd


def adasum(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of two vectors, as Maleki et al. (2020) define it."""
    dot = float(a @ b)
    return (1 - dot / (2 * float(a @ a))) * a + (1 - dot / (2 * float(b @ b))) * b


def tensor_of(rank: int) -> torch.Tensor:
    """A rank's vector."""
    return torch.randn(1_000, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def expected() -> torch.Tensor:
    """What comes out: ranks are placed on hosts in blocks."""
    per_host = hvd.local_size()
    ranks = [range(start, start + per_host) for start in range(0, hvd.size(), per_host)]
    means = [torch.stack([tensor_of(rank) for rank in each]).mean(0) for each in ranks]
    result = means[0]
    for mean in means[1:]:
        result = adasum(result, mean)
    return result


def main() -> None:
    """Of one or two hosts."""
    torch.set_num_threads(1)
    hvd.init(process_sets=[hvd.ProcessSet([0])])
    mine = tensor_of(hvd.rank())
    torch.testing.assert_close(hvd.allreduce(mine, op=hvd.Adasum, name="named"), expected())
    torch.testing.assert_close(hvd.allreduce(mine, op=hvd.Adasum), expected())
    place = mine.clone()
    assert hvd.allreduce_(place, op=hvd.Adasum, postscale_factor=2.0) is place
    torch.testing.assert_close(place, expected() * 2)
    handles = [hvd.allreduce_async(mine, op=hvd.Adasum, name=f"many.{number}") for number in range(10)]
    for handle in handles:
        torch.testing.assert_close(hvd.synchronize(handle), expected())
    weight = torch.nn.Parameter(torch.zeros(1_000, dtype=torch.float64))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), named_parameters=[("w", weight)], op=hvd.Adasum
    )
    (weight * mine).sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), -expected())
    hvd.barrier()
    print(f"rank {hvd.rank()}: hosts first")
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
