"""Run by every rank: options of the distributed optimizer, against one process with all ranks' data."""

from __future__ import annotations

import sys
import warnings
from typing import Any, Callable

import torch
from torch import nn

import ronde.torch as hvd

ROWS, STEPS = 4, 6


class Network(nn.Module):
    """Shared, frozen and unused parameters, and one that is not laid out in rows."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 8)
        self.shared = nn.Parameter(torch.randn(8, 8).t())
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))) + self.frozen)
        return (x @ self.shared @ self.shared).sum(1)


def batches(step: int) -> list[torch.Tensor]:
    """Each rank's rows."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(ROWS, 5, generator=generator) for _ in range(hvd.size())]


def check_like_one_process(
    make: Callable[[Any], torch.optim.Optimizer], tolerance: float = 1e-5, passes: int = 1, **options: Any
) -> None:
    """Trains alone on everything and together on parts, and compares."""
    alone, together = Network(0), Network(hvd.rank())
    single = make([p for p in alone.parameters() if p.requires_grad])
    distributed = make([p for p in together.parameters() if p.requires_grad])
    hvd.broadcast_parameters(together.state_dict(), root_rank=0)
    if callable(options.get("groups")):
        options["groups"] = options["groups"](together)
    named = list(together.named_parameters())
    distributed = hvd.DistributedOptimizer(
        distributed, named_parameters=named, backward_passes_per_step=passes, **options
    )
    for step in range(STEPS):
        single.zero_grad()
        distributed.zero_grad(set_to_none=bool(step % 2))
        for part in range(passes):
            every = batches(100 * step + part)
            torch.cat([alone(rows) for rows in every]).mean().backward()
            together(every[hvd.rank()]).mean().backward()
        single.step()
        distributed.step()
        assert together.unused.grad is None, "no rank has a gradient, so there is none"
        assert together.shared.grad is not None
        assert together.shared.grad.stride() == together.shared.stride()
    for name, weight in alone.state_dict().items():
        torch.testing.assert_close(together.state_dict()[name], weight, rtol=tolerance, atol=tolerance, msg=name)


class Reversed:
    """Changes shape and type."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.double().flatten().flip(0), (tensor.shape, tensor.dtype)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        shape, dtype = ctx
        return tensor.flip(0).reshape(shape).to(dtype)


class Scaled:
    """Changes the tensor itself, and what comes back."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor.mul_(0.5), 2.0

    @staticmethod
    def decompress(tensor: torch.Tensor, factor: Any) -> torch.Tensor:
        return tensor * factor


def check_options() -> None:
    """Each option, and some together."""

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)

    check_like_one_process(sgd)
    check_like_one_process(lambda p: torch.optim.AdamW(p, lr=0.01), 1e-4)
    check_like_one_process(sgd, gradient_predivide_factor=2.0)
    check_like_one_process(sgd, passes=3)
    check_like_one_process(sgd, groups=2)
    check_like_one_process(sgd, groups=100)
    check_like_one_process(sgd, groups=lambda net: [[net.first.weight, net.second.bias], [net.shared]], passes=2)
    check_like_one_process(sgd, groups=2, gradient_predivide_factor=2.0, compression=Reversed)
    check_like_one_process(sgd, compression=Reversed)
    check_like_one_process(sgd, compression=Scaled)
    check_like_one_process(sgd, compression=Scaled, groups=2)
    check_like_one_process(sgd, 2e-2, compression=hvd.Compression.bf16)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_like_one_process(sgd, num_groups=2)
    assert [warning for warning in caught if "num_groups is deprecated" in str(warning.message)]


def check_one_rank_without() -> None:
    """A gradient that only some ranks have; and one that is there in some steps only."""
    rank, size = hvd.rank(), hvd.size()
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(weights, lr=1.0, weight_decay=0.5), named_parameters=zip("ab", weights)
    )
    for step in range(8):
        optimizer.zero_grad()
        (weights[0] if rank == 0 else weights[1]).sum().backward()
        if step % 2 and rank == 1:
            weights[0].sum().backward()
        optimizer.synchronize()
        expected = (1 + step % 2) / size
        torch.testing.assert_close(weights[0].grad, torch.full((2,), expected))
        torch.testing.assert_close(weights[1].grad, torch.full((2,), (size - 1) / size))
        with optimizer.skip_synchronize():
            optimizer.step()
    for weight in weights:
        gathered = hvd.allgather(weight.detach().reshape(1, -1))
        assert (gathered == gathered[0]).all(), "ranks have drifted apart"


def check_replaced_gradient() -> None:
    """The user puts another tensor into `grad`, before and while it is reduced."""
    rank, size = hvd.rank(), hvd.size()
    weight = nn.Parameter(torch.zeros(40_000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), named_parameters=[("w", weight)])
    weight.grad = torch.full_like(weight, float(rank))
    optimizer.synchronize()
    mean = torch.full_like(weight, sum(range(size)) / size).detach()
    torch.testing.assert_close(weight.grad, mean)
    optimizer.zero_grad()
    (weight * float(rank)).sum().backward()
    weight.grad = torch.zeros_like(weight)
    optimizer.synchronize()
    torch.testing.assert_close(weight.grad, mean)
    kept = weight.grad
    hvd.barrier()
    del optimizer
    torch.testing.assert_close(kept, mean)


def check_sparse() -> None:
    """An embedding whose gradients are sparse, with rows that ranks share; dense ones give the same."""
    rank, size = hvd.rank(), hvd.size()
    table = torch.arange(40.0).reshape(10, 4)
    results = []
    for sparse_as_dense in (False, True):
        alone = nn.Embedding(10, 4, sparse=True, _weight=table.clone())
        together = nn.Embedding(10, 4, sparse=True, _weight=table.clone())
        single: Any = torch.optim.SGD(alone.parameters(), lr=0.5)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(together.parameters(), lr=0.5),
            named_parameters=together.named_parameters(),
            sparse_as_dense=sparse_as_dense,
        )
        for step in range(3):
            single.zero_grad()
            optimizer.zero_grad()
            every = [torch.tensor([0, (each + step) % 10, each + 1]) for each in range(size)]
            (torch.cat([alone(rows) for rows in every]).sum() / size).backward()
            # In the last step rank 0 has no gradient at all, once it is known to be sparse.
            if step < 2 or rank:
                together(every[rank]).sum().backward()
            else:
                single.zero_grad()
                (torch.cat([alone(rows) for rows in every[1:]]).sum() / size).backward()
            if step == 2 and rank:
                single.zero_grad()
                (torch.cat([alone(rows) for rows in every[1:]]).sum() / size).backward()
            optimizer.step()
            single.step()
        torch.testing.assert_close(together.weight, alone.weight)
        results.append(together.weight.detach())
    torch.testing.assert_close(results[0], results[1])


def check_reductions_during_the_backward_pass() -> None:
    """The gradient of the last layer is on its way before that of the first one is computed."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(layers.parameters(), lr=0.1), named_parameters=layers.named_parameters()
    )
    first, last = layers[0].weight, layers[1].weight
    found: list[bool] = []
    first.register_hook(lambda _: found.append(last in optimizer._handles and first not in optimizer._handles))
    layers(torch.ones(2, 3)).sum().backward()
    assert found == [True]
    optimizer.step()


def check_uneven_data() -> None:
    """Ranks with fewer batches join, in epochs long enough for step counts to differ widely."""
    rank, size = hvd.rank(), hvd.size()
    weights = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=0.1), named_parameters=zip("ab", weights))
    for _ in range(3):
        for _ in range(10 + 2 * rank):
            optimizer.zero_grad()
            weights[0].sum().backward()
            optimizer.step()
        assert hvd.join() == size - 1
    hvd.broadcast_parameters(dict(zip("ab", weights)), root_rank=size - 1)


def check_frozen_on_the_way() -> None:
    """A parameter that one rank freezes is still trained by the others, and unchanged if all freeze it."""
    rank, size = hvd.rank(), hvd.size()
    weights = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(weights, lr=1.0, momentum=0.9, weight_decay=0.1), named_parameters=zip("ab", weights)
    )
    for step in range(12):
        weights[0].requires_grad_(step < 5 or rank > 0)
        weights[1].requires_grad_(step < 5)
        optimizer.zero_grad()
        sum(
            weight.sum() for weight in [weights[0] * 1.0, weights[1] * 1.0, torch.ones(1, requires_grad=True)]
        ).backward()
        if step == 5:
            before = weights[1].detach().clone()
        optimizer.step()
    torch.testing.assert_close(weights[1].detach(), before)
    assert weights[1].grad is None
    if size > 1 and rank == 0:
        assert weights[0].grad is None, "a frozen parameter has no gradient here"


def check_wrapped_again() -> None:
    """A distributed optimizer may be wrapped again; hooks fire once, also after a state was loaded."""
    rank, size = hvd.rank(), hvd.size()
    weight = nn.Parameter(torch.zeros(2))
    plain = torch.optim.SGD([weight], lr=1.0)
    first = hvd.DistributedOptimizer(plain, named_parameters=[("w", weight)])
    second = hvd.DistributedOptimizer(first, named_parameters=[("w", weight)])
    steps: list[int] = []
    second.register_step_post_hook(lambda *_: steps.append(1))
    second.load_state_dict(second.state_dict())
    (weight * float(rank)).sum().backward()
    second.step()
    assert steps == [1], steps
    torch.testing.assert_close(weight.detach(), torch.full((2,), -sum(range(size)) / size))


def check_states_that_are_missing() -> None:
    """They are made by a step that moves nothing; gradients are there, as Horovod leaves them."""
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5),
        lambda p: torch.optim.AdamW(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1),
    ):
        weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2), requires_grad=False)]
        optimizer = hvd.DistributedOptimizer(make(weights), named_parameters=zip("ab", weights))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        torch.testing.assert_close(weights[0].detach(), torch.ones(3))
        torch.testing.assert_close(weights[0].grad, torch.zeros(3))
        assert weights[1].grad is None
        state = optimizer.state_dict()["state"].get(0, {})
        assert all(not torch.as_tensor(value).any() for key, value in state.items() if value is not None), state
    table = nn.Embedding(5, 2, sparse=True)
    sparse = hvd.DistributedOptimizer(
        torch.optim.SparseAdam(table.parameters(), lr=0.1),
        named_parameters=table.named_parameters(),
        sparse_as_dense=True,
    )
    hvd.broadcast_parameters(table.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(sparse, root_rank=0, model=table)
    for _ in range(3):
        sparse.zero_grad()
        table(torch.tensor([0, hvd.rank() + 1])).sum().backward()
        sparse.step()
    gathered = hvd.allgather(table.weight.detach().reshape(1, -1))
    assert (gathered == gathered[0]).all()


def check_sparse_only_elsewhere() -> None:
    """The first gradient of a rank is missing, and sparse on others."""
    table = nn.Embedding(6, 2, sparse=True)
    hvd.broadcast_parameters(table.state_dict(), root_rank=0)
    before = table.weight.detach().clone()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), named_parameters=table.named_parameters()
    )
    if hvd.rank():
        table(torch.tensor([1])).sum().backward()
    optimizer.step()
    before[1] -= (hvd.size() - 1) / hvd.size()
    torch.testing.assert_close(table.weight.detach(), before)


def check_process_set() -> None:
    """Ranks of the set reduce among themselves, the others step by themselves."""
    rank = hvd.rank()
    some = hvd.add_process_set(range(hvd.size() - 1)) if hvd.size() > 2 else hvd.add_process_set([0])
    ranks = some.ranks or []
    weight = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), named_parameters=[("w", weight)], process_set=some
    )
    (weight * float(rank)).sum().backward()
    optimizer.step()
    expected = sum(ranks) / len(ranks) if rank in ranks else float(rank)
    torch.testing.assert_close(weight.detach(), torch.full((3,), -expected))
    hvd.barrier()
    assert hvd.remove_process_set(some)


def check_adasum() -> None:
    """One step: the parameters move by the Adasum of what each rank would have done alone."""
    rank, size = hvd.rank(), hvd.size()
    weight, bias = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight, bias], lr=0.5), named_parameters=[("w", weight), ("b", bias)], op=hvd.Adasum
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1)
    apart = torch.zeros(4)
    apart[rank % 4] = 1.0
    ((weight * apart).sum() + bias.sum()).backward()
    optimizer.synchronize()
    torch.testing.assert_close(weight.grad, apart, msg="gradients are this rank's own")
    optimizer.step()
    scheduler.step()
    moved = torch.tensor([0.5 if each < size else 0.0 for each in range(4)])
    torch.testing.assert_close(weight.detach(), 1.0 - moved)
    torch.testing.assert_close(bias.detach(), torch.full((2,), 0.5))
    optimizer.zero_grad()
    bias.sum().backward()
    try:
        bias.sum().backward()
    except AssertionError as error:
        assert "backward_passes_per_step" in str(error)
    else:
        raise AssertionError("a second pass was accepted")
    try:
        with optimizer.skip_synchronize():
            pass
    except AssertionError as error:
        assert "not supported" in str(error)
    else:
        raise AssertionError("Adasum was left out")


def check_scaler_and_clipping() -> None:
    """Mixed precision: unscale, clip and step within `skip_synchronize`; a step with an overflow is skipped."""
    rank, size = hvd.rank(), hvd.size()
    weight = nn.Parameter(torch.zeros(4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), named_parameters=[("w", weight)])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for overflow in (False, True):
        before = weight.detach().clone()
        optimizer.zero_grad()
        factor = float("inf") if overflow and rank == size - 1 else float(rank)
        scaler.scale((weight * factor).sum()).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([weight], 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        mean = sum(range(size)) / size
        expected = 0.0 if overflow else min(1.0, 1 / (mean * 2)) * mean if mean else 0.0
        torch.testing.assert_close(before - weight.detach(), torch.full((4,), expected), rtol=1e-5, atol=1e-5)


def check_scheduler_made_before() -> None:
    """A scheduler of the optimizer that was wrapped; steps reduce all the same, and nobody is warned."""
    rank, size = hvd.rank(), hvd.size()
    weight = nn.Parameter(torch.zeros(2))
    plain = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, 1, 0.5)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=[("w", weight)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (weight * float(rank)).sum().backward()
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    torch.testing.assert_close(weight.detach(), torch.full((2,), -sum(range(size)) / size))


def check_models_that_differ() -> None:
    """Ranks that disagree on a parameter get an error with its name and both shapes; the job continues."""
    rank, size = hvd.rank(), hvd.size()
    weight = nn.Parameter(torch.zeros(3 if rank == 0 else 4))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), named_parameters=[("layer.weight", weight)])
    weight.sum().backward()
    try:
        optimizer.step()
    except hvd.HorovodInternalError as error:
        for wanted in ("Mismatched ALLREDUCE tensor shapes", "layer.weight", "[3]", "[4]"):
            assert wanted in str(error), error
    else:
        raise AssertionError("shapes that differ were reduced")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


def check_dropped() -> None:
    """Loading a state drops reductions in flight, and later steps work."""
    for options in ({}, {"groups": 1}):
        weights = [nn.Parameter(torch.zeros(200_000)) for _ in range(4)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(weights, lr=1.0), named_parameters=zip("abcd", weights), **options
        )
        for _ in range(5):
            torch.stack([weight * 7.0 for weight in weights]).sum().backward()
            optimizer.load_state_dict(optimizer.state_dict())
            optimizer.zero_grad(set_to_none=False)
            torch.stack([weight * float(hvd.rank()) for weight in weights]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        expected = torch.full((200_000,), -5 * (hvd.size() - 1) / 2)
        for weight in weights:
            torch.testing.assert_close(weight.detach(), expected)


def check_batch_norm() -> None:
    """The same as the plain one on everybody's rows, forward, backward and in its statistics; rows differ in number."""
    rank, size = hvd.rank(), hvd.size()
    for shape, kind in (((6,), nn.BatchNorm1d), ((6, 5, 3), nn.BatchNorm2d)):
        for options in ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}):
            torch.manual_seed(1)
            plain, synced = kind(6, **options).double(), hvd.SyncBatchNorm(6, **options).double()
            synced.load_state_dict(plain.state_dict())
            for _ in range(3):
                every = [torch.randn(each + 2, *shape, dtype=torch.float64) for each in range(size)]
                mine = every[rank].clone().requires_grad_()
                whole = torch.cat(every).requires_grad_()
                start = sum(each + 2 for each in range(rank))
                end = start + rank + 2
                expected = plain(whole)
                result = synced(mine)
                torch.testing.assert_close(result, expected[start:end])
                factor = torch.arange(float(whole.numel()), dtype=torch.float64).reshape(whole.shape).sin()
                (expected * factor).sum().backward()
                (result * factor[start:end]).sum().backward()
                torch.testing.assert_close(mine.grad, whole.grad[start:end])  # type: ignore[index]
                for name, parameter in synced.named_parameters():
                    total = hvd.allreduce(parameter.grad, op=hvd.Sum)
                    torch.testing.assert_close(total, dict(plain.named_parameters())[name].grad)
                plain.zero_grad()
                synced.zero_grad()
            for name, buffer in plain.named_buffers():
                torch.testing.assert_close(dict(synced.named_buffers())[name], buffer)
            plain.eval()
            synced.eval()
            x = torch.randn(4, *shape, dtype=torch.float64)
            torch.testing.assert_close(synced(x), plain(x))
    half = hvd.SyncBatchNorm(6)(torch.randn(4, 6, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16
    try:
        hvd.SyncBatchNorm(6)(torch.ones(6))
    except ValueError as error:
        assert "expected at least 2D input" in str(error)
    else:
        raise AssertionError("a vector was normalized")


def main() -> None:
    """Everything."""
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    checks = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
    checks.remove(check_like_one_process)  # what `check_options` calls
    for check in checks:
        check()
        hvd.barrier()
    print(f"rank {hvd.rank()} of {hvd.size()}: {len(checks)} checks of the optimizer hold")
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
