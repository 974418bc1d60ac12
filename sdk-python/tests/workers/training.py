"""Run by every rank: the distributed optimizer matches one process on the concatenated batch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn

import ronde.torch as hvd
from ronde.torch import mpi_ops

STEPS = 50
ROWS = 8


def model(seed: int) -> nn.Module:
    """A small network; one layer has no gradient in most steps."""
    torch.manual_seed(seed)
    return nn.ModuleDict(
        {"body": nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)), "unused": nn.Linear(3, 3)}
    )


def loss_of(network: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Mean squares."""
    return nn.functional.mse_loss(network["body"](batch[0]), batch[1])  # type: ignore[index]


def batches(step: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each rank's batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 3, generator=generator)) for _ in range(size)]


def check_equals_single_process(make: Any, compression: Any, tolerance: float) -> None:
    """Trains alone and together, and compares the weights."""
    rank, size = hvd.rank(), hvd.size()
    alone, together = model(0), model(rank)
    single = make(alone.parameters())
    distributed = hvd.DistributedOptimizer(
        make(together.parameters()), named_parameters=together.named_parameters(), compression=compression
    )
    assert isinstance(distributed, type(single))
    assert type(distributed).__name__ == type(single).__name__
    hvd.broadcast_parameters(together.state_dict(), root_rank=0)
    for step in range(STEPS):
        every = batches(step, size)
        single.zero_grad()
        concatenated = tuple(torch.cat(parts) for parts in zip(*every))
        loss_of(alone, concatenated).backward()  # type: ignore[arg-type]
        for parameter in alone["unused"].parameters():  # type: ignore[index]
            parameter.grad = torch.zeros_like(parameter)
        single.step()
        distributed.zero_grad()
        loss_of(together, every[rank]).backward()
        distributed.step()
    for name, weight in together.state_dict().items():
        torch.testing.assert_close(weight, alone.state_dict()[name], rtol=tolerance, atol=tolerance, msg=name)


def check_options() -> None:
    """Passes, predivision, clipping, double reduction, wrong orders of calls."""
    rank, size = hvd.rank(), hvd.size()
    weight = nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0),
        named_parameters=[("w", weight)],
        backward_passes_per_step=2,
        gradient_predivide_factor=2.0,
    )
    for _ in range(2):
        (weight * (rank + 1)).sum().backward()
    if size > 1:
        try:
            optimizer.zero_grad()
        except AssertionError as error:
            assert "zero_grad" in str(error)
        else:
            raise AssertionError("gradients in flight were forgotten")
        try:
            (weight * 1).sum().backward()
        except AssertionError as error:
            assert "backward_passes_per_step" in str(error)
        else:
            raise AssertionError("a third pass was accepted")
        optimizer.synchronize()
        # The third pass was accumulated before the hook refused it, and then overwritten by the reduction.
    else:
        optimizer.synchronize()
    mean = 2.0 * sum(range(1, size + 1)) / size
    torch.testing.assert_close(weight.grad, torch.full((4,), mean))
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((4,), -0.5))
    optimizer.zero_grad(set_to_none=True)
    assert weight.grad is None
    assert optimizer.backward_passes_per_step == 2
    optimizer.set_backward_passes_per_step(1)
    assert optimizer.backward_passes_per_step == 1
    weight.sum().backward()
    optimizer.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    assert len([warning for warning in caught if "skip_synchronize" in str(warning.message)]) == 1


def check_state() -> None:
    """A state that only the root has reaches all ranks, options included."""
    rank = hvd.rank()
    network = model(rank)
    optimizer: Any = torch.optim.Adam(network.parameters(), lr=0.1 if rank else 0.003, betas=(0.5, 0.6))
    if rank == 0:
        loss_of(network, batches(0, 1)[0]).backward()
        optimizer.step()
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=network.named_parameters())
    hvd.broadcast_parameters(network.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert optimizer.param_groups[0]["lr"] == 0.003
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    copied = copy.deepcopy(optimizer.state_dict())
    assert copied["state"], "the root's state has not come"
    for index, state in copied["state"].items():
        for key, value in state.items():
            gathered = hvd.allgather(value.reshape(1, -1).float(), name=f"check.{index}.{key}")
            assert (gathered == gathered[0]).all(), key


def check_calls() -> None:
    """The functions on tensors: kinds, gradients, in place, types that NumPy lacks."""
    rank, size = hvd.rank(), hvd.size()
    total = float(sum(range(1, size + 1)))
    mine = torch.full((2, 3), float(rank + 1), requires_grad=True)
    result = hvd.allreduce(mine, op=hvd.Sum, name="differentiable")
    torch.testing.assert_close(result, torch.full((2, 3), total))
    result.sum().backward()
    torch.testing.assert_close(mine.grad, torch.full((2, 3), float(size)))

    gathered = hvd.allgather(torch.full((rank + 1, 2), float(rank), requires_grad=True), name="rows")
    assert gathered.shape == (sum(range(1, size + 1)), 2)

    half = torch.full((5,), rank + 1, dtype=torch.bfloat16)
    assert hvd.allreduce_(half, op=hvd.Max) is half
    assert half.dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), torch.full((5,), float(size)))

    # Of vectors that point the same way it is their mean.
    torch.testing.assert_close(hvd.allreduce(torch.ones(4), op=hvd.Adasum), torch.ones(4))

    strided = torch.arange(12.0).reshape(3, 4).t()
    torch.testing.assert_close(hvd.allreduce(strided, op=hvd.Average), strided)
    inplace = torch.zeros(4, 3).t()
    hvd.broadcast_(inplace if rank else inplace.fill_(3.0), root_rank=0)
    torch.testing.assert_close(inplace, torch.full((3, 4), 3.0))

    handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum)
    torch.testing.assert_close(hvd.synchronize(handle), torch.full((3,), float(size)))
    assert hvd.synchronize(handle) is None


def check_kinds() -> None:
    """Collectives that `ronde.torch` has not, on its tensors: results are PyTorch's where it is asked for."""
    client, size = mpi_ops.client(), hvd.size()
    mine = torch.arange(size, dtype=torch.bfloat16)
    result, received = client.alltoall(mine, torch.ones(size, dtype=torch.int32))
    torch.testing.assert_close(result, torch.full((size,), hvd.rank(), dtype=torch.bfloat16))
    torch.testing.assert_close(received, torch.ones(size, dtype=torch.int32))
    torch.testing.assert_close(client.scatter(mine, 0), mine[hvd.rank() : hvd.rank() + 1])
    torch.testing.assert_close(client.reduce_scatter(mine, op=hvd.Max), mine[hvd.rank() : hvd.rank() + 1])
    if size > 1:
        sent = client.send_async(mine, (hvd.rank() + 1) % size)
        message = client.recv((hvd.rank() - 1) % size, like=mine)
        torch.testing.assert_close(message, mine)
        sent.wait()
    for each in client.grouped_allgather([mine, mine.to(torch.int16)]):
        assert each.shape == (size * size,)


def main() -> None:
    """Everything; then again after a new start."""
    torch.set_num_threads(1)
    for _ in range(2):
        hvd.init()
        assert hvd.is_initialized()
        check_calls()
        check_kinds()
        check_equals_single_process(lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), hvd.Compression.none, 1e-5)
        check_equals_single_process(lambda p: torch.optim.Adam(p, lr=0.01), hvd.Compression.none, 1e-4)
        check_equals_single_process(lambda p: torch.optim.SGD(p, lr=0.05), hvd.Compression.fp16, 2e-2)
        check_options()
        check_state()
        hvd.barrier()
        print(f"rank {hvd.rank()} of {hvd.size()}: training agrees with one process", flush=True)
        hvd.barrier()
        hvd.shutdown()
        assert not hvd.is_initialized()


if __name__ == "__main__":
    main()
