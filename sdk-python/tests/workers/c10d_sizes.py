"""Run by every rank: lists whose sizes differ between ranks are an error on all ranks."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any, Callable

import torch
import torch.distributed as dist

import ronde.torch.distributed
from ronde.errors import RefusedError
from ronde.torch.distributed.group import group_of


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


def check_what_one_rank_alone_has_wrong() -> None:
    """The other gets an error, too, and does not wait."""
    # PyTorch's functions refuse some of these by themselves, and call no backend.
    ours: Any = group_of(dist.group.WORLD)
    opts = SimpleNamespace(rootRank=0, rootTensor=0)
    tensor, odd = torch.ones(2), torch.ones(2, dtype=torch.float64)
    eight_bits = torch.ones(2).to(torch.float8_e4m3fn)
    sparse = torch.ones(2).to_sparse()
    for call in (
        lambda: ours.reduce_scatter([torch.empty(2)], [[tensor, odd if rank else tensor]]).wait(),
        lambda: dist.all_reduce(eight_bits if rank else tensor.clone()),
        lambda: dist.reduce(eight_bits if rank else tensor.clone(), 0),
        lambda: ours.broadcast([sparse if rank else tensor.clone()], opts).wait(),
        lambda: dist.broadcast(tensor.clone(), group_src=9 if rank else 0),
        lambda: dist.reduce(tensor.clone(), group_dst=9 if rank else 0),
        lambda: ours.scatter([sparse if rank else tensor.clone()], [] if rank else [ones(2, 2)], opts).wait(),
        lambda: ours.gather([] if rank else [ones(2, 2)], [sparse if rank else tensor], opts).wait(),
        lambda: ours.allgather([ones(2, 2)], [sparse if rank else tensor]).wait(),
        lambda: dist.all_reduce(tensor.clone(), dist.ReduceOp.BAND if rank else dist.ReduceOp.SUM),
    ):
        assert fails(call)
        again = torch.ones(1)
        dist.all_reduce(again)
        assert again.item() == 2


def check_a_submission_that_fails_on_one_rank() -> None:
    """The operation fails on the other rank, too, and later ones match."""
    group: Any = group_of(dist.group.WORLD)
    plain = group._ranks.client._submit

    def refuse(*arguments: Any, **options: Any) -> Any:
        group._ranks.client._submit = plain
        raise RefusedError("this request is over a limit", "limit")

    if rank == 1:
        group._ranks.client._submit = refuse
    assert fails(lambda: dist.all_reduce(torch.ones(2)))
    tensor = torch.full((2,), 3.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [6.0, 6.0]


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
    check_what_one_rank_alone_has_wrong,
    check_a_submission_that_fails_on_one_rank,
):
    check()
dist.destroy_process_group()
print("sizes are compared")
