"""Run by 2 ranks or more: what PyTorch builds on process groups, on the backend "ronde"."""

from __future__ import annotations

import datetime
import sys
import tempfile
import threading
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ronde.torch.distributed
from ronde.torch.distributed.group import CAN_EXTEND_BACKEND, group_of


def check_works() -> None:
    """PyTorch returns the backend's own operations, with all that they know."""
    tensor = torch.ones(3)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.exception() is None
    assert work.result()[0] is tensor
    if rank == 0:
        place = torch.empty(2)
        sender = dist.recv(place)
        assert sender == 1
        assert place.tolist() == [7.0, 7.0]
    elif rank == 1:
        dist.send(torch.full((2,), 7.0), 0)
    dist.barrier()


def check_coalescing() -> None:
    first, second = torch.ones(2), torch.full((3,), float(rank))
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.all_reduce(first)
        dist.broadcast(second, 1)
    manager.wait()
    assert first.tolist() == [size] * 2
    assert second.tolist() == [1.0] * 3


def check_coalescing_after_an_error() -> None:
    """An exception in a block leaves nothing behind, and a block of another thread is a separate one."""
    for _ in range(2):
        try:
            with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True):
                dist.broadcast(torch.ones(1), 0)
                raise KeyError("in the block")
        except KeyError:
            pass
    check_coalescing()
    group = group_of(dist.group.WORLD)
    assert group is not None
    tensor, elsewhere, ended = torch.ones(2), torch.ones(3), []

    def coalesce() -> None:
        group.start_coalescing()
        dist.broadcast(elsewhere, 0)
        ended.append(group.end_coalescing())

    group.start_coalescing()
    thread = threading.Thread(target=coalesce)
    thread.start()
    thread.join(60)
    dist.all_reduce(tensor)
    works = group.end_coalescing(), ended[0]
    assert [[each is wanted for each in work.result()] for work, wanted in zip(works, (tensor, elsewhere))] == [
        [True]
    ] * 2
    assert tensor.tolist() == [size] * 2


def check_objects() -> None:
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": each} for each in range(size)]
    one = [f"from {rank}"]
    dist.broadcast_object_list(one, 1)
    assert one == ["from 1"]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, 0)
    assert gathered is None or gathered == list(range(size))
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {each}" for each in range(size)] if rank == 1 else None, 1)
    assert mine == [f"for {rank}"]


def check_compiled() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        summed = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        whole = functional.all_gather_tensor(summed, 0, dist.group.WORLD)
        return functional.reduce_scatter_tensor(whole, "avg", 0, dist.group.WORLD) + 1

    compiled = torch.compile(step, fullgraph=CAN_EXTEND_BACKEND, backend="aot_eager")
    mine = torch.full((2,), float(rank))
    assert torch.equal(compiled(mine), step(mine))
    assert step(mine).tolist() == [2.0 * sum(range(size)) + 1] * 2


def check_sharded_training() -> None:
    if not hasattr(torch.cpu.Stream, "record_event"):
        return  # this PyTorch shards on GPUs only, over whatever backend
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    plain.load_state_dict(model.state_dict())
    rows = torch.arange(8.0 * size).reshape(size, 8) / 10
    plain(rows).square().mean().backward()
    fully_shard(model[0])
    fully_shard(model)
    model(rows[rank : rank + 1]).square().mean().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        assert isinstance(ours.grad, DTensor)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def check_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4 * size), torch.nn.ReLU(), torch.nn.Linear(4 * size, 3))
    rows = torch.arange(8.0).reshape(2, 4)
    wanted = model(rows)
    split = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.testing.assert_close(split(rows), wanted)
    whole = torch.arange(4.0 * size).reshape(2 * size, 2)
    shards = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(shards.redistribute(mesh, [Replicate()]).to_local(), whole)
    assert torch.equal(shards.redistribute(mesh, [Shard(1)]).full_tensor() if size == 2 else whole, whole)


def check_checkpoint() -> None:
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(4.0 * size)
    folder: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    checkpoint.save({"weights": distribute_tensor(whole, mesh, [Shard(0)]), "step": 3}, checkpoint_id=folder[0])
    read = {"weights": distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)]), "step": 0}
    checkpoint.load(read, checkpoint_id=folder[0])
    assert torch.equal(read["weights"].full_tensor(), whole)
    assert read["step"] == 3


def check_types() -> None:
    """Types that are only moved, and sums of complex numbers."""
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.complex128, torch.bool, torch.int16):
        tensor = torch.tensor([rank + 1, 2]).to(dtype)
        places = [torch.zeros(2).to(dtype) for _ in range(size)]
        dist.all_gather(places, tensor)
        assert [place.to(torch.complex128)[0].real.item() for place in places] == [
            torch.tensor(each + 1).to(dtype).to(torch.complex128).real.item() for each in range(size)
        ]
        dist.broadcast(tensor, 1)
        assert tensor.to(torch.complex128)[0].real.item() == torch.tensor(2).to(dtype).to(torch.complex128).real.item()
    total = torch.tensor([complex(rank, 1)])
    dist.all_reduce(total)
    assert total.item() == complex(sum(range(size)), size)
    negated = torch.tensor([complex(1, rank)]).conj().imag  # a negated view
    assert negated.is_neg()
    dist.all_reduce(negated)
    assert negated.item() == -sum(range(size))


def check_errors() -> None:
    try:
        dist.all_reduce(torch.ones(1).to(torch.float8_e4m3fn))
    except ValueError as error:
        assert "only moved, not reduced" in str(error), error
    else:
        raise AssertionError("nobody reduces float8")
    dist.barrier()


def check_monitored_barrier() -> None:
    if not CAN_EXTEND_BACKEND:
        return  # this PyTorch asks for Gloo by its name
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=60))
    if rank == 0:
        try:
            dist.monitored_barrier(timeout=datetime.timedelta(0))
        except RuntimeError as error:
            assert "Rank 0 timed out in monitoredBarrier" in str(error), error
        else:
            raise AssertionError("nobody comes in no time")
    dist.barrier()


def check_other_backends_beside() -> None:
    """An older PyTorch cannot have other backends for other devices: that is an error and nothing else is done."""
    dist.destroy_process_group()
    if CAN_EXTEND_BACKEND:
        dist.init_process_group("cpu:ronde,cuda:ronde")
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        assert tensor.item() == size
    else:
        dist.init_process_group("cpu:ronde,cuda:gloo")
        try:
            dist.all_reduce(torch.ones(1))
        except NotImplementedError as error:
            assert "give the backend ronde alone" in str(error), error
        else:
            raise AssertionError("Gloo was asked for")
    dist.destroy_process_group()
    dist.init_process_group("ronde")


def check_disagreement() -> None:
    """A rank or size that is not the job's is an error that says what differs."""
    dist.destroy_process_group()
    for given, words in [
        ({"rank": rank, "world_size": size + 3}, f"world size {size + 3}, but {size} in the job"),
        ({"rank": (rank + 1) % size, "world_size": size}, f"rank {(rank + 1) % size}, but {rank} in the job"),
    ]:
        try:
            dist.init_process_group("ronde", store=dist.HashStore(), **given)
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
    dist.init_process_group("ronde")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == size


ronde.torch.distributed.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
assert group_of(dist.group.WORLD) is not None
checks = [
    check_works,
    check_coalescing,
    check_coalescing_after_an_error,
    check_objects,
    check_compiled,
    check_sharded_training,
    check_tensor_parallel,
    check_checkpoint,
    check_types,
    check_errors,
    check_monitored_barrier,
    check_other_backends_beside,
    check_disagreement,
]
for check in checks:
    if sys.argv[1:] and check.__name__ not in sys.argv[1:]:
        continue
    check()
dist.destroy_process_group()
print("all features work")
