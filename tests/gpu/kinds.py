"""Run by each rank: each collective gives tensors of each type on a device what one process computes in main memory.

python kinds.py DEVICE, which is "cuda" or, to try the script, "cpu"
"""

from __future__ import annotations

import functools
import sys

import ronde.torch as hvd
import torch

TYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]
# One element, an odd number, and more than a chunk of a copy.
LENGTHS = [1, 1_001, (4 << 20) // 4 + 3]


def contribution(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank contributes: small numbers, whose sums are exact in each type."""
    generator = torch.Generator().manual_seed(rank + 1)
    return torch.randint(0, 2 if dtype == torch.bool else 4, (elements,), generator=generator).to(dtype)


def check(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compares exactly, types too."""
    assert torch.equal(found.cpu(), expected), f"{what} of {found.dtype}, {found.shape}"


def check_type(dtype: torch.dtype, elements: int, device: torch.device) -> None:
    """All collectives on one type and length."""
    rank, size = hvd.rank(), hvd.size()
    every = [contribution(of, elements, dtype) for of in range(size)]
    mine = every[rank].to(device)
    reductions = [(hvd.Sum, torch.logical_or if dtype == torch.bool else torch.add)]
    if dtype != torch.bool:
        reductions += [(hvd.Max, torch.maximum), (hvd.Min, torch.minimum), (hvd.Product, torch.mul)]
    for op, combine in reductions:
        check(hvd.allreduce(mine, op=op), functools.reduce(combine, every), f"all-reduce {op}")
    total = functools.reduce(reductions[0][1], every)
    check(hvd.grouped_allreduce([mine, mine], op=hvd.Sum)[1], total, "a group")
    check(hvd.allgather(mine), torch.cat(every), "all-gather")
    check(hvd.broadcast(mine, size - 1), every[-1], "broadcast")
    # What every rank sends to this one: its parts have as many elements as they divide into.
    splits = torch.full((size,), elements // size, dtype=torch.int32)
    splits[-1] += elements - int(splits.sum())
    start = int(splits[:rank].sum())
    received, _ = hvd.alltoall(mine, splits=splits)
    check(received, torch.cat([of[start : start + int(splits[rank])] for of in every]), "all-to-all")
    if dtype != torch.bool:
        rows = [of.repeat(size).reshape(size, elements) for of in every]
        found = hvd.reducescatter(rows[rank].to(device), op=hvd.Sum)
        check(found, functools.reduce(torch.add, rows)[rank : rank + 1], "reduce-scatter")


def main() -> None:
    """Checks all types."""
    kind = sys.argv[1]
    hvd.init()
    if kind == "cuda":
        torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    for dtype in TYPES:
        for elements in LENGTHS:
            check_type(dtype, elements, torch.device(kind))
    print(f"rank {hvd.rank()}: all types hold", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
