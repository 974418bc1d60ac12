"""Run by every rank: collectives of `torch.distributed` on the backend "ronde", each against what it should give."""

from __future__ import annotations

import datetime
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ronde.torch.distributed
from ronde.torch.distributed.group import group_of

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8]


def mine(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, others on each rank."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + 3 * rank) % 7).reshape(shape).to(dtype)


def check_reductions(ranks: list[int], group: Any) -> None:
    me, size = dist.get_rank(), len(ranks)
    for dtype in DTYPES:
        stacked = torch.stack([mine(rank, 4, 3, dtype=dtype) for rank in ranks])
        wanted = {
            dist.ReduceOp.SUM: stacked.sum(0).to(dtype),
            dist.ReduceOp.MAX: stacked.amax(0),
            dist.ReduceOp.MIN: stacked.amin(0),
            dist.ReduceOp.PRODUCT: stacked.prod(0).to(dtype),
        }
        for op, want in wanted.items():
            tensor = mine(me, 4, 3, dtype=dtype)
            dist.all_reduce(tensor, op, group=group)
            assert torch.equal(tensor, want), (dtype, op, tensor, want)
    mean = mine(me, 5)
    dist.all_reduce(mean, dist.ReduceOp.AVG, group=group)
    torch.testing.assert_close(mean, torch.stack([mine(rank, 5) for rank in ranks]).mean(0))
    turned = mine(me, 6, 4).t()  # not in rows
    dist.all_reduce(turned, group=group)
    assert torch.equal(turned, sum(mine(rank, 6, 4) for rank in ranks).t())
    numbers = torch.complex(mine(me, 3), mine(me + 1, 3))
    dist.all_reduce(numbers, group=group)
    assert torch.equal(numbers.imag, sum(mine(rank + 1, 3) for rank in ranks))
    root = ranks[-1]
    tensor = mine(me, 3)
    dist.reduce(tensor, root, group=group)
    assert torch.equal(tensor, sum(mine(rank, 3) for rank in ranks) if me == root else mine(me, 3))
    place = torch.empty(2, 3)
    parts = [mine(me + 10 * part, 2, 3) for part in range(size)]
    here = ranks.index(me)
    want = sum(mine(rank + 10 * here, 2, 3) for rank in ranks)
    dist.reduce_scatter(place, parts, group=group)
    assert torch.equal(place, want)
    dist.reduce_scatter_tensor(place.zero_(), torch.cat(parts), group=group)
    assert torch.equal(place, want)


def check_moves(ranks: list[int], group: Any) -> None:
    me, size, here = dist.get_rank(), len(ranks), ranks.index(dist.get_rank())
    for root in ranks:
        tensor = mine(me, 5, 2)
        dist.broadcast(tensor, root, group=group)
        assert torch.equal(tensor, mine(root, 5, 2))
        places = [torch.empty(3) for _ in ranks] if me == root else None
        dist.gather(mine(me, 3), places, root, group=group)
        assert places is None or all(torch.equal(place, mine(rank, 3)) for place, rank in zip(places, ranks))
        place = torch.empty(2, 2)
        dist.scatter(place, [mine(10 + part, 2, 2) for part in range(size)] if me == root else None, root, group=group)
        assert torch.equal(place, mine(10 + here, 2, 2))
    places = [torch.empty(2, rank + 1) for rank in ranks]
    dist.all_gather(places, mine(me, 2, me + 1), group=group)
    assert all(torch.equal(place, mine(rank, 2, rank + 1)) for place, rank in zip(places, ranks))
    whole = torch.empty(size * 2, 3)
    dist.all_gather_into_tensor(whole, mine(me, 2, 3), group=group)
    assert torch.equal(whole, torch.cat([mine(rank, 2, 3) for rank in ranks]))
    scalar = [torch.empty(()) for _ in ranks]
    dist.all_gather(scalar, torch.tensor(float(me)), group=group)
    assert [place.item() for place in scalar] == ranks
    received = torch.empty(size, 2)
    dist.all_to_all_single(received, torch.stack([mine(10 * me + rank, 2) for rank in ranks]), group=group)
    assert torch.equal(received, torch.stack([mine(10 * rank + me, 2) for rank in ranks]))
    sent, gets = [rank + 1 for rank in ranks], [me + 1] * size
    received = torch.empty(sum(gets), 2)
    dist.all_to_all_single(received, torch.full((sum(sent), 2), float(me)), gets, sent, group=group)
    assert torch.equal(received, torch.cat([torch.full((me + 1, 2), float(rank)) for rank in ranks]))
    outputs = [torch.empty(me + 1) for _ in ranks]
    dist.all_to_all(outputs, [torch.full((rank + 1,), float(me)) for rank in ranks], group=group)
    assert all(torch.equal(output, torch.full((me + 1,), float(rank))) for output, rank in zip(outputs, ranks))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": me}, group=group)
    assert objects == [{"rank": rank} for rank in ranks]


def check_messages(ranks: list[int], group: Any) -> None:
    here, size = ranks.index(dist.get_rank()), len(ranks)
    after, before = ranks[(here + 1) % size], ranks[here - 1]
    place = torch.empty(4)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, mine(ranks[here], 4), after, group, tag=5),
            dist.P2POp(dist.irecv, place, before, group, tag=5),
        ]
    )
    for work in works:
        work.wait()
    assert torch.equal(place, mine(before, 4))


def check_works(group: Any) -> None:
    """What is in flight, futures, and several at once."""
    tensors = [torch.full((1_000 * index,), float(index)) for index in range(1, 9)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    futures = [work.get_future() for work in works[::2]]
    for index, future in zip(range(1, 9, 2), futures):
        (value,) = future.wait()
        assert value is tensors[index - 1]
    size = dist.get_world_size(group)
    for index, (work, tensor) in enumerate(zip(works, tensors), 1):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        assert work.result() == [tensor]
        assert (tensor == index * size).all()
    # What nobody waits for is done all the same, and more than may be in flight at once as well.
    many = [torch.full((10,), float(index)) for index in range(40)]
    for tensor in many:
        dist.all_reduce(tensor, group=group, async_op=True)
    last = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(16)]
    assert all(work.wait() for work in last)
    assert [tensor[0].item() for tensor in many] == [float(index * size) for index in range(40)]
    dist.barrier(group)
    with dist._coalescing_manager(group=group, async_ops=True) as manager:
        for tensor in tensors[:3]:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    assert [tensor[0].item() for tensor in tensors[:3]] == [index * size * size for index in range(1, 4)]
    parts = [torch.full((2,), float(dist.get_rank(group)) + index) for index in range(2)]
    wholes = [torch.empty(2 * size, requires_grad=True) for _ in parts]
    with dist._coalescing_manager(group=group):
        for whole, part in zip(wholes, parts):
            dist.all_gather_into_tensor(whole, part, group=group)
    for index, whole in enumerate(wholes):
        assert whole[::2].tolist() == [float(rank + index) for rank in range(size)]
    shares = [torch.empty(2) for _ in wholes]
    with dist._coalescing_manager(group=group):
        for share, whole in zip(shares, wholes):
            dist.reduce_scatter_tensor(share, whole.detach(), group=group)
    here = dist.get_rank(group)
    assert [share.tolist() for share in shares] == [[float((here + index) * size)] * 2 for index in range(2)]


def check_mesh() -> None:
    """Groups that PyTorch makes itself, and what programs reach by their names."""
    ronde.torch.distributed.register_mesh((2, 2))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    me = dist.get_rank()
    across = functional.all_reduce(torch.tensor([float(me)]), "sum", mesh["replicate"].get_group())
    within = functional.all_reduce(torch.tensor([float(me)]), "sum", mesh["shard"].get_group())
    assert (across.item(), within.item()) == (2 * (me % 2) + 2, 4 * (me // 2) + 1)
    model = torch.nn.Linear(4, 2, bias=False)
    torch.nn.init.ones_(model.weight)
    if not hasattr(torch.cpu.Stream, "record_event"):
        return  # this PyTorch shards on GPUs only, over whatever backend
    fully_shard(model, mesh=mesh)
    model(torch.full((1, 4), float(me))).sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((2, 4), 1.5))


def check_rejected_calls() -> None:
    for what, words in [
        (lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)), "only moved, not reduced"),
        (lambda: dist.all_reduce(torch.ones(1), dist.ReduceOp.BAND), "bit"),
    ]:
        try:
            what()
        except (NotImplementedError, ValueError, RuntimeError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)


def check_failures() -> None:
    """Failures on all ranks are raised by waits, polls and futures. The group remains usable."""
    for ask in ("wait", "exception", "future"):
        work = dist.all_reduce(torch.ones(2 + dist.get_rank()), async_op=True)
        try:
            if ask == "exception":
                while not work.is_completed():
                    pass
                assert not work.is_success()
                raise work.exception()
            future = work.get_future() if ask == "future" else work
            future.wait()
        except RuntimeError as error:
            assert "shape" in str(error), error
        else:
            raise AssertionError(f"{ask}: shapes differ")
    dist.barrier()


def check_timeout() -> None:
    """The group's timeout fails the operation on the rank that waits, and with it on the others."""
    group = ronde.torch.distributed.new_group(timeout=datetime.timedelta(seconds=0.3))
    if dist.get_rank() == 0:
        try:
            dist.all_reduce(torch.ones(2), group=group)
        except RuntimeError as error:
            assert "still in flight after 0.3 s, the timeout of its process group" in str(error), error
        else:
            raise AssertionError("rank 0 was alone")
        dist.barrier()
    else:
        dist.barrier()  # of another group; rank 0 has given up
        # So long that this rank receives rank 0's failure, and does not give up before.
        group_of(group).set_timeout(datetime.timedelta(seconds=60))
        try:
            dist.all_reduce(torch.ones(2), group=group)
        except RuntimeError as error:
            assert "rank 0" in str(error), error
        else:
            raise AssertionError("rank 0 has given up")


try:
    dist.init_process_group("ronde", store=dist.HashStore(), rank=0, world_size=99)
except ValueError as error:
    assert "leave ranks and sizes to init_method" in str(error), error
else:
    raise AssertionError("there are not so many ranks")
if sys.argv[1:] == ["rendezvous"]:
    dist.init_process_group("ronde", init_method="ronde://")
else:
    ronde.torch.distributed.init_process_group()
assert dist.get_backend() == "ronde"
everybody = list(range(dist.get_world_size()))
others = everybody[1:] or everybody
some = ronde.torch.distributed.new_group(others)
twice = ronde.torch.distributed.new_group(others)
for ranks, group in [(everybody, None), (others, some), (others, twice)]:
    if dist.get_rank() not in ranks:
        continue
    check_reductions(ranks, group)
    check_moves(ranks, group)
    if len(ranks) > 1:
        check_messages(ranks, group)
    check_works(group)
if len(everybody) == 4:
    check_mesh()
check_rejected_calls()
if len(everybody) > 1:
    check_failures()
    check_timeout()
dist.destroy_process_group()
assert not ronde.torch.is_initialized()
print("all collectives are right")
