"""Run by every rank: plugins in `ronde.torch`, per call and under the distributed optimizer."""

from __future__ import annotations

from typing import Any

import torch

import ronde.torch as hvd


def model() -> Any:
    """The same on all ranks; one of its gradients is larger than 64 KiB."""
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(40, 500), torch.nn.ReLU(), torch.nn.Linear(500, 3))


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one rank."""
    made = torch.Generator().manual_seed(rank)
    return torch.randn(8, 40, generator=made), torch.randint(0, 3, (8,), generator=made)


def train(steps: int, **options: Any) -> list[torch.Tensor]:
    """The parameters after some steps, the same bits on all ranks."""
    trained = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(trained.parameters(), lr=0.1), named_parameters=trained.named_parameters(), **options
    )
    inputs, labels = batch(hvd.rank())
    for _ in range(steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(trained(inputs), labels).backward()
        optimizer.step()
    for parameter in trained.parameters():
        rows = hvd.allgather(parameter.detach().reshape(1, -1))
        assert bool((rows == rows[0]).all()), "ranks have different bits"
    return [parameter.detach() for parameter in trained.parameters()]


def train_in_turns(steps: int, count: int, **options: Any) -> list[list[torch.Tensor]]:
    """What `train` gives for each of several equal models, whose optimizers take turns."""
    models = [model() for _ in range(count)]
    optimizers = [
        hvd.DistributedOptimizer(
            torch.optim.SGD(each.parameters(), lr=0.1), named_parameters=each.named_parameters(), **options
        )
        for each in models
    ]
    inputs, labels = batch(hvd.rank())
    for _ in range(steps):
        for trained, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(trained(inputs), labels).backward()
            optimizer.step()
    return [[parameter.detach() for parameter in trained.parameters()] for trained in models]


def distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """The largest difference of two models."""
    return max(float((a - b).abs().max()) for a, b in zip(one, other))


def check_optimizer() -> None:
    """Compressed gradients train nearly as plain ones do, one by one, grouped, and predivided."""
    plain, start = train(5), [parameter.detach() for parameter in model().parameters()]
    moved = distance(plain, start)
    bf16 = hvd.Compression.plugin("bf16")
    for options in ({}, {"groups": 2}, {"gradient_predivide_factor": 2.0}):
        assert 0 < distance(plain, train(5, compression=bf16, **options)) < 0.02 * moved, options
    exact = hvd.Compression.plugin("topk", ratio=1.0)
    assert distance(plain, train(5, compression=exact)) < 1e-5
    sparse = hvd.Compression.plugin("topk", ratio=0.05)
    alone = train(3, compression=sparse)
    assert distance(start, alone) > 0
    # Residuals of one optimizer's gradients do not affect another's, whose parameters have the same names.
    for one in (train(3, compression=sparse), *train_in_turns(3, 2, compression=sparse)):
        assert distance(alone, one) == 0
    # The native median, and the plugin's.
    assert distance(train(3, op=6), train(3, op=hvd.PluginOp("median"))) == 0


def check_optimizers_that_are_made_again() -> None:
    """Some ranks make one in each call of an elastic function; a new worker makes only the last one."""
    trained = model()
    inputs, labels = batch(hvd.rank())
    for _ in range(1 + hvd.size() - hvd.rank()):
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(trained.parameters(), lr=0.1),
            trained.named_parameters(),
            hvd.Compression.plugin("bf16"),
        )
    torch.nn.functional.cross_entropy(trained(inputs), labels).backward()
    optimizer.step()
    # The next one has the same number on all ranks, too.
    train(1, compression=hvd.Compression.plugin("bf16"))


def check_calls() -> None:
    """Per call: the tensor's type stays, and the gradient is reduced as ever."""
    mine = torch.full((1_000,), float(hvd.rank() + 1), requires_grad=True)
    total = hvd.size() * (hvd.size() + 1) / 2
    bf16 = hvd.Compression.plugin("bf16")
    result = hvd.allreduce(mine, name="mine", op=hvd.Sum, compression=bf16)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.detach(), torch.full((1_000,), total))
    result.sum().backward()
    torch.testing.assert_close(mine.grad, torch.full((1_000,), float(hvd.size())))
    group = hvd.grouped_allreduce([mine, 2 * mine], name="both", op=hvd.Sum, compression=bf16)
    torch.testing.assert_close(group[1].detach(), torch.full((1_000,), 2 * total))
    middle = hvd.allreduce(mine.detach(), op=hvd.PluginOp("median"))
    torch.testing.assert_close(middle, torch.full((1_000,), (hvd.size() + 1) / 2))
    in_place = mine.detach().clone()
    assert hvd.allreduce_(in_place, op=hvd.PluginOp("median")) is in_place
    torch.testing.assert_close(in_place, middle)
    try:
        hvd.allreduce(torch.ones(4, dtype=torch.float64), compression=hvd.Compression.plugin("topk"))
    except hvd.RefusedError as error:
        assert "float64" in str(error), error
    else:
        raise AssertionError("top-k has taken float64")


def main() -> None:
    """All of it."""
    hvd.init()
    check_calls()
    check_optimizer()
    check_optimizers_that_are_made_again()
    hvd.barrier()
    print(f"rank {hvd.rank()}: gradients go by plugins", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
