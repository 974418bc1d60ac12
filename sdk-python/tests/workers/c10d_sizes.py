"""Run by every rank: lists whose sizes differ between ranks are an error on all ranks."""

from __future__ import annotations

import datetime
from typing import Any, Callable

import torch
import torch.distributed as dist

import ronde.torch.distributed


def fails(call: Callable[[], Any]) -> str:
    """Why it fails on this rank; nothing where it does not."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        assert "in flight" not in str(error), error
        return str(error)
    return ""


def ones(*sizes: int) -> list[torch.Tensor]:
    return [torch.ones(size) for size in sizes]


def check_all_gather() -> None:
    """Rank 0 has other sizes in its list than it and the others bring, with the same sum."""
    for lists, mine in [
        (([1, 3], [2, 2]), 2),
        (([3, 1], [2, 2]), 2),
        (([1, 3], [3, 1]), (1, 1)),
        (([2, 2], [2, 2]), (1, 3)),
        (([1, 3], [1, 3]), (2, 2)),
    ]:
        sent = mine if isinstance(mine, int) else mine[rank]
        assert fails(lambda: dist.all_gather(ones(*lists[rank]), torch.ones(sent))), (lists, mine)  # noqa: B023
        dist.barrier()
    places = ones(1, 3)
    dist.all_gather(places, torch.full((1 + 2 * rank,), float(rank)))
    assert [place.tolist() for place in places] == [[0.0], [1.0, 1.0, 1.0]]


def check_all_to_all() -> None:
    sizes = [[1, 3], [3, 1]][rank]
    assert fails(lambda: dist.all_to_all(ones(2, 2), ones(*sizes)))
    dist.barrier()
    assert fails(lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], sizes))
    dist.barrier()
    # What one rank alone has wrong.
    assert fails(lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4), [2, 2], [2, 2 - rank]))
    dist.barrier()
    assert fails(lambda: dist.all_to_all(ones(2, 2)[: 2 - rank], ones(2, 2)))
    dist.barrier()


def check_gather_and_scatter() -> None:
    assert fails(lambda: dist.gather(torch.ones(1 + 2 * rank), ones(2, 2) if rank == 0 else None))
    dist.barrier()
    assert bool(fails(lambda: dist.gather(torch.ones(2), ones(1, 3) if rank == 0 else None))) == (rank == 0)
    dist.barrier()
    assert fails(lambda: dist.scatter(torch.ones(2), ones(1, 3) if rank == 0 else None))
    dist.barrier()
    assert bool(fails(lambda: dist.scatter(torch.ones(2 + rank), ones(2, 2) if rank == 0 else None))) == (rank == 1)
    dist.barrier()


def check_reduce_scatter() -> None:
    for lists in (([1, 3], [2, 2]), ([1, 3], [3, 1]), ([2, 2], [3, 1])):
        output = torch.empty(lists[rank][rank])
        assert fails(lambda: dist.reduce_scatter(output, ones(*lists[rank]))), lists  # noqa: B023
        dist.barrier()
    assert fails(lambda: dist.reduce_scatter(torch.empty(2), ones(1, 3)))
    dist.barrier()
    assert fails(lambda: dist.reduce_scatter(torch.empty(2), ones(2, 2)[: 2 - rank]))
    dist.barrier()
    assert bool(fails(lambda: dist.reduce_scatter(torch.empty(2 + rank), ones(2, 2)))) == (rank == 1)
    dist.barrier()


def check_ranks_that_are_not_there() -> None:
    for outside in (-1, dist.get_world_size()):
        assert "invalid rank" in fails(lambda: dist.broadcast(torch.ones(2), group_src=outside))  # noqa: B023
        assert "invalid rank" in fails(lambda: dist.reduce(torch.ones(2), group_dst=outside))  # noqa: B023
    dist.barrier()


def check_single_tensors() -> None:
    assert bool(fails(lambda: dist.all_gather_into_tensor(torch.empty(4 + rank), torch.ones(2)))) == (rank == 1)
    dist.barrier()
    assert fails(lambda: dist.all_gather_into_tensor(torch.empty(4), torch.ones(1 + 2 * rank)))
    dist.barrier()
    assert fails(lambda: dist.reduce_scatter_tensor(torch.empty(2), torch.ones(3)))
    dist.barrier()
    assert fails(lambda: dist.all_reduce(torch.ones(2 + rank)))
    dist.barrier()
    assert fails(lambda: dist.broadcast(torch.ones(2 + rank), 0))
    dist.barrier()
    if rank == 0:
        dist.send(torch.ones(3), 1)
    else:
        assert "rank 0 sent 3 elements" in fails(lambda: dist.recv(torch.ones(2), 0))
    dist.barrier()


ronde.torch.distributed.init_process_group(timeout=datetime.timedelta(seconds=60))
rank = dist.get_rank()
assert dist.get_world_size() == 2
for check in (
    check_all_gather,
    check_all_to_all,
    check_gather_and_scatter,
    check_reduce_scatter,
    check_ranks_that_are_not_there,
    check_single_tensors,
):
    check()
dist.destroy_process_group()
print("sizes are compared")
