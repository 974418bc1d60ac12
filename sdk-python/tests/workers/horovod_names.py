"""Run by every rank: names of submodules of `horovod` that require a job."""

from __future__ import annotations

import torch

import horovod.torch as hvd
from horovod.common import elastic
from horovod.torch import mpi_ops, optimizer


def same(actual: torch.Tensor, expected: list[float]) -> None:
    """Equal values."""
    assert actual.flatten().tolist() == expected, (actual, expected)


def gradient_of(result: torch.Tensor, ones: torch.Tensor) -> list[float]:
    """The gradient of the sum of a result."""
    (found,) = torch.autograd.grad(result.sum(), ones)
    return [float(value) for value in found.flatten().tolist()]


def check_autograd_functions() -> None:
    """Values and gradients, with Horovod's order of arguments."""
    rank, size, everybody = hvd.rank(), hvd.size(), hvd.global_process_set
    ones = torch.full((size, 1), rank + 1.0, requires_grad=True)
    total = sum(range(1, size + 1))
    reduced = mpi_ops.HorovodAllreduce.apply(ones, None, "a", hvd.Sum, 1.0, 1.0, everybody)
    same(reduced, [total] * size)
    assert gradient_of(reduced, ones) == [size] * size
    (grouped,) = mpi_ops.HorovodGroupedAllreduce.apply(None, "b", hvd.Average, 1.0, 2.0, everybody, ones)
    same(grouped, [2 * total / size] * size)
    gathered = mpi_ops.HorovodAllgather.apply(ones, "c", everybody)
    same(gathered, [each + 1.0 for each in range(size) for _ in range(size)])
    assert gathered.grad_fn is not None
    (gathered,) = mpi_ops.HorovodGroupedAllgather.apply("d", everybody, ones)
    assert gathered.shape == (size * size, 1)
    received = mpi_ops.HorovodBroadcast.apply(ones, size - 1, "e", everybody)
    same(received, [size] * size)
    exchanged, received = mpi_ops.HorovodAlltoall.apply(ones, None, "f", everybody)
    same(exchanged, [each + 1.0 for each in range(size)])
    assert (received.dtype, received.tolist()) == (torch.int32, [1] * size)
    exchanged, received = mpi_ops.HorovodAlltoall.apply(
        ones, torch.tensor([size, *[0] * (size - 1)]).int(), "g", everybody
    )
    assert received.tolist() == [size if rank == 0 else 0] * size
    mine = mpi_ops.HorovodReducescatter.apply(ones, "h", hvd.Sum, everybody, 1.0, 1.0)
    same(mine, [total])
    (mine,) = mpi_ops.HorovodGroupedReducescatter.apply("i", hvd.Sum, everybody, 1.0, 1.0, ones)
    same(mine, [total])
    try:
        mpi_ops.HorovodAlltoall.apply(torch.ones(size + 1), None, "j", everybody)
    except ValueError as error:
        assert f"rows that {size} ranks can share equally, not {size + 1} rows" in str(error)
    else:
        raise AssertionError("rows that cannot be shared equally were accepted")


def check_optimizers() -> None:
    """Their classes."""
    model = torch.nn.Linear(2, 1)
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(wrapped, optimizer._DistributedOptimizer)
    adasum = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), op=hvd.AdaSum)
    assert isinstance(adasum, optimizer._DistributedAdasumOptimizer)


def check_notices() -> None:
    """A notice at rank 0 interrupts all ranks at their next commit."""
    begun: list[int] = []

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> int:
        begun.append(state.epoch)
        if len(begun) == 1 and hvd.rank() == 0:
            elastic.notification_manager.handle_hosts_updated(1.0, elastic.HostUpdateResult.mixed)
        state.epoch += 1
        state.commit()
        return int(state.epoch)

    assert train(hvd.elastic.TorchState(epoch=0)) == 2
    assert begun == [0, 1]
    assert (hvd.elastic.sampler.size(), hvd.elastic.state.rank()) == (hvd.size(), hvd.rank())
    hvd.elastic.reset()
    assert hvd.is_initialized()


hvd.init()
check_autograd_functions()
check_optimizers()
check_notices()
hvd.barrier()
print("the names of Horovod hold", flush=True)
