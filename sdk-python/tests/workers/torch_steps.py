"""Run by every rank: steps of the distributed optimizer with closures and groups, and its attributes."""

from __future__ import annotations

import sys
import warnings
from typing import Any, Callable

import torch
from torch import nn

import ronde.torch as hvd

Make = Callable[[Any], torch.optim.Optimizer]


def mean_of_ranks() -> float:
    """Of 2, 4, 6, ..., what rank r's gradient is."""
    return hvd.size() + 1.0


def same_everywhere(tensor: torch.Tensor) -> None:
    """The same bits on all ranks."""
    rows = hvd.allgather(tensor.detach().reshape(1, -1))
    assert bool((rows == rows[0]).all()), "ranks have drifted apart"


def raises(kind: type[Exception], text: str, call: Callable[[], Any]) -> None:
    """An error of this kind and text."""
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing was raised that contains {text}")


def data(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one rank."""
    made = torch.Generator().manual_seed(rank)
    x = torch.randn(8, 3, dtype=torch.float64, generator=made)
    return x, torch.sin(x).sum(1, keepdim=True) + rank


def network() -> nn.Module:
    """The same on all ranks."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_of(model: nn.Module, ranks: list[int]) -> torch.Tensor:
    """The mean of these ranks' losses."""
    return torch.stack([nn.functional.mse_loss(model(x), y) for x, y in map(data, ranks)]).mean()


def check_closures_like_one_process() -> None:
    """Optimizers that call the closure once and many times, with its loss and parameters after each step."""
    size, rank = hvd.size(), hvd.rank()
    makes: dict[str, tuple[Make, dict[str, Any]]] = {
        "SGD": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {}),
        "SGD in groups": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), {"groups": 2}),
        "Adam": (lambda p: torch.optim.Adam(p, lr=0.05), {}),
        "Adam, predivided": (lambda p: torch.optim.Adam(p, lr=0.05), {"gradient_predivide_factor": 2.0}),
        "LBFGS": (lambda p: torch.optim.LBFGS(p, lr=0.3, max_iter=5), {}),
        "LBFGS with a line search": (lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"), {}),
    }
    for what, (make, options) in makes.items():
        alone, together = network(), network()
        single = make(alone.parameters())
        wrapped = hvd.DistributedOptimizer(
            make(together.parameters()), named_parameters=together.named_parameters(), **options
        )
        for _ in range(3):
            expected = single.step(closure_of(alone, single, list(range(size))))
            found = wrapped.step(closure_of(together, wrapped, [rank]))
            torch.testing.assert_close(found, expected.detach(), msg=f"{what}: the loss")
            for ours, theirs in zip(together.parameters(), alone.parameters()):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=what)
                same_everywhere(ours)


def closure_of(model: nn.Module, optimizer: Any, ranks: list[int]) -> Callable[[], torch.Tensor]:
    """As PyTorch's documentation has it."""

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, ranks)
        loss.backward()
        return loss

    return closure


def simple(**options: Any) -> tuple[nn.Parameter, Any]:
    """One parameter of zeros, whose gradient is to be set by `pull`."""
    weight = nn.Parameter(torch.zeros(1))
    plain = torch.optim.SGD([weight], lr=1.0)
    return weight, hvd.DistributedOptimizer(plain, named_parameters=[("w", weight)], **options)


def pull(weight: torch.Tensor) -> torch.Tensor:
    """A loss whose gradient is 2, 4, 6, ... by rank, and whose value here is this, too."""
    return ((weight + 1.0) * (2.0 + 2.0 * hvd.rank())).sum()


def check_losses_of_closures() -> None:
    """Tensors and numbers are averaged, sums added up; other results are passed on."""
    mean = mean_of_ranks()
    for convert, expected in (
        (lambda loss: loss, torch.tensor(mean)),
        (lambda loss: loss.item(), mean),
        (lambda loss: None, None),
        (lambda loss: (loss.item(), "text"), (2.0 + 2.0 * hvd.rank(), "text")),
    ):
        weight, optimizer = simple()

        def closure(convert: Any = convert, weight: Any = weight, optimizer: Any = optimizer) -> Any:
            optimizer.zero_grad()
            loss = pull(weight)
            loss.backward()
            return convert(loss)

        assert optimizer.step(closure) == expected
        torch.testing.assert_close(weight.detach(), torch.full((1,), -mean))
    weight, optimizer = simple(op=hvd.Sum)

    def summed() -> torch.Tensor:
        loss = pull(weight)
        loss.backward()
        return loss

    assert optimizer.step(summed).item() == mean * hvd.size()
    torch.testing.assert_close(weight.detach(), torch.full((1,), -mean * hvd.size()))


def check_closures_that_synchronize() -> None:
    """A closure may call `synchronize` itself, to clip; its gradients are not reduced again, also not with op=Sum."""
    expected = mean_of_ranks() * hvd.size()
    for is_skipped in (False, True):
        weight, optimizer = simple(op=hvd.Sum)

        def closure(weight: Any = weight, optimizer: Any = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = pull(weight)
            loss.backward()
            optimizer.synchronize()
            weight.grad.mul_(0.5)
            return loss

        if is_skipped:
            with optimizer.skip_synchronize():
                optimizer.step(closure)
        else:
            optimizer.step(closure)
        torch.testing.assert_close(weight.detach(), torch.full((1,), -0.5 * expected))


def check_backward_before_a_closure() -> None:
    """Gradients in flight when a step with a closure begins are reduced first; a closure may forget or add to them."""
    mean = mean_of_ranks()
    for forgets, factor in ((True, 1.0), (False, 2.0)):
        weight, optimizer = simple()
        pull(weight).backward()

        def closure(forgets: bool = forgets, weight: Any = weight, optimizer: Any = optimizer) -> torch.Tensor:
            if forgets:
                optimizer.zero_grad()
            loss = pull(weight)
            loss.backward()
            return loss

        optimizer.step(closure)
        torch.testing.assert_close(weight.detach(), torch.full((1,), -factor * mean))
    weight, optimizer = simple(backward_passes_per_step=2)

    def twice() -> torch.Tensor:
        optimizer.zero_grad()
        pull(weight).backward()
        loss = pull(weight)
        loss.backward()
        return loss

    optimizer.step(twice)
    torch.testing.assert_close(weight.detach(), torch.full((1,), -2.0 * mean))
    pull(weight).backward()
    raises(AssertionError, "zero_grad", optimizer.zero_grad)
    optimizer.synchronize()
    optimizer.zero_grad()


def check_closures_outside_of_the_set() -> None:
    """Ranks outside the process set step by themselves, and with Adasum each rank calls its closure by itself."""
    size, rank = hvd.size(), hvd.rank()
    some = hvd.add_process_set(each for each in range(size) if each > 0)
    weight, optimizer = simple(process_set=some)
    assert optimizer.process_set is some

    def closure(weight: Any = weight, optimizer: Any = optimizer) -> torch.Tensor:
        optimizer.zero_grad()
        loss = pull(weight)
        loss.backward()
        return loss

    optimizer.step(closure)
    expected = 2.0 if rank == 0 else sum(2.0 + 2.0 * each for each in range(1, size)) / (size - 1)
    torch.testing.assert_close(weight.detach(), torch.full((1,), -expected))
    hvd.barrier()
    assert hvd.remove_process_set(some)
    if size & (size - 1):
        return
    together = network()
    adasum = hvd.DistributedOptimizer(
        torch.optim.LBFGS(together.parameters(), lr=0.1, max_iter=3 + rank),
        named_parameters=together.named_parameters(),
        op=hvd.Adasum,
    )
    before = loss_of(together, list(range(size))).item()
    adasum.step(closure_of(together, adasum, [rank]))
    assert loss_of(together, list(range(size))).item() < before
    for parameter in together.parameters():
        same_everywhere(parameter)


def check_groups_with_foreign_members() -> None:
    """Groups ignore frozen members and those of another optimizer; generators are read once."""
    size, rank = hvd.size(), hvd.rank()
    for as_generators in (False, True):
        weight, other, single = (nn.Parameter(torch.ones(2)) for _ in range(3))
        frozen, foreign = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
        named = zip(("w", "f", "o", "s"), (weight, frozen, other, single))
        groups: Any = [[weight, frozen], [foreign, other], [foreign_alone := nn.Parameter(torch.ones(1))]]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight, frozen, other, single], lr=0.5, weight_decay=0.5),
            named_parameters=named,
            groups=(iter(group) for group in groups) if as_generators else groups,
        )
        assert optimizer._requires_update == {weight, other, single}
        for _ in range(2):
            optimizer.zero_grad()
            foreign.grad = None
            ((weight + other + single + foreign).sum() * float(rank) + foreign_alone.sum()).backward()
            optimizer.step()
        torch.testing.assert_close(frozen.detach(), torch.ones(2))
        assert frozen.grad is None
        torch.testing.assert_close(foreign.grad, torch.full((2,), float(rank)))
        expected = torch.ones(2)
        for _ in range(2):
            expected = expected - 0.5 * ((size - 1) / 2 + 0.5 * expected)
        for moved in (weight, other, single):
            torch.testing.assert_close(moved.detach(), expected)
    for wrong, text in (([weight], "list of list"), ("ab", "list of list"), (-1, "non-negative"), ([[1]], "consist")):
        raises(
            ValueError,
            text,
            lambda wrong=wrong: hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), groups=wrong),
        )
    raises(
        ValueError,
        "only appear once",
        lambda: hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.5), groups=[[weight], (weight,)]),
    )


def check_generators_of_groups() -> None:
    """Layers' parameters make groups."""
    model = network()
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        groups=[layer.parameters() for layer in linear],
    )
    loss_of(model, [hvd.rank()]).backward()
    optimizer.synchronize()
    whole = network()
    loss_of(whole, list(range(hvd.size()))).backward()
    for ours, theirs in zip(model.parameters(), whole.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad)


def check_aliases() -> None:
    """References to `p.grad`, or to its memory, taken before `synchronize` see the result."""
    mean = mean_of_ranks()
    for rows in (10, 40_000):
        for options in (
            {},
            {"groups": 1},
            {"compression": hvd.Compression.fp16},
            {"compression": hvd.Compression.bf16},
        ):
            weights = [nn.Parameter(torch.zeros(rows)), nn.Parameter(torch.zeros(2, rows).t())]
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(weights, lr=1.0), named_parameters=zip("ab", weights), **options
            )
            for _ in range(2):
                (weights[0].sum() + weights[1].sum()).mul(2.0 + 2.0 * hvd.rank()).backward()
                kept = [weight.grad for weight in weights]
                views = [grad.detach() for grad in kept if grad is not None]
                optimizer.synchronize()
                for weight, grad, view in zip(weights, kept, views):
                    assert weight.grad is grad
                    torch.testing.assert_close(grad, torch.full_like(grad, mean))
                    if options or rows == 10 or not weight.is_contiguous():
                        torch.testing.assert_close(view, grad, msg=f"{options}, {rows} rows: a view is stale")
                optimizer.zero_grad()
    table = nn.Embedding(4, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), named_parameters=table.named_parameters()
    )
    table(torch.tensor([hvd.rank() % 4])).sum().backward()
    kept_sparse = table.weight.grad
    optimizer.synchronize()
    assert table.weight.grad is kept_sparse
    assert kept_sparse is not None
    assert kept_sparse.to_dense().sum().item() == 2.0, kept_sparse


def check_attributes() -> None:
    """Horovod's wrapper has these, and programs read and change them."""
    size = hvd.size()
    weights = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    weights[2].requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(weights, lr=1.0), named_parameters=zip("abc", weights), gradient_predivide_factor=2.0
    )
    assert optimizer._parameter_names == dict(zip(weights, "abc"))
    assert optimizer._requires_update == set(weights[:2])
    assert optimizer._allreduce_delay == dict.fromkeys(weights, 1)
    assert (optimizer.op, optimizer.process_set) == (hvd.Average, hvd.global_process_set)
    assert (optimizer.gradient_predivide_factor, optimizer.backward_passes_per_step) == (2.0, 1)
    assert not optimizer._handles
    (weights[0] * 2.0).sum().backward()
    assert list(optimizer._handles) == [weights[0]]
    assert optimizer._allreduce_delay[weights[0]] == 0
    handle, context = optimizer._handles[weights[0]]
    assert context is None
    assert hvd.synchronize(handle) is weights[0].grad
    torch.testing.assert_close(weights[0].grad, torch.full((2,), 2.0))
    optimizer.step()
    assert not optimizer._handles
    assert optimizer._allreduce_delay[weights[0]] == 1
    # What is dropped stays as it is on this rank; the next step is as ever.
    optimizer.zero_grad()
    (weights[0] * float(hvd.rank())).sum().backward()
    if hvd.rank() % 2:
        optimizer._handles = {}
    else:
        optimizer._handles.clear()
    assert not optimizer._handles
    torch.testing.assert_close(weights[0].grad, torch.full((2,), float(hvd.rank())))
    raises(TypeError, "cannot be replaced", lambda: setattr(optimizer, "_handles", {weights[0]: (1, None)}))
    optimizer.step()
    torch.testing.assert_close(weights[0].grad, torch.full((2,), (size - 1) / 2))
    optimizer.op = hvd.Sum
    optimizer.zero_grad()
    weights[0].sum().backward()
    optimizer.step()
    torch.testing.assert_close(weights[0].grad, torch.full((2,), float(size)))
    # One that is taken out is not reduced unless a backward pass computes it.
    optimizer._requires_update.discard(weights[1])
    weights[1].grad = torch.full((2,), float(hvd.rank()))
    optimizer.synchronize()
    torch.testing.assert_close(weights[1].grad, torch.full((2,), float(hvd.rank())))


def check_passes() -> None:
    """`backward_passes_per_step` may be set, and delays of single parameters."""
    mean = mean_of_ranks()
    weight, optimizer = simple()
    optimizer.backward_passes_per_step = 3
    assert optimizer._allreduce_delay == {weight: 3}
    for done in range(3):
        assert bool(optimizer._handles) is False, done
        pull(weight).backward()
    assert optimizer._handles
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((1,), -3.0 * mean))
    optimizer.zero_grad()
    optimizer.set_backward_passes_per_step(1)
    pull(weight).backward()
    raises(AssertionError, "backward_passes_per_step", pull(weight).backward)
    optimizer.synchronize()
    optimizer.zero_grad()
    optimizer._allreduce_delay[weight] = 2
    pull(weight).backward()
    pull(weight).backward()
    optimizer.synchronize()
    torch.testing.assert_close(weight.grad, torch.full((1,), 2.0 * mean))
    for wrong in (0, -1):
        raises(ValueError, "> 0", lambda wrong=wrong: setattr(optimizer, "backward_passes_per_step", wrong))


def check_kinds_of_parameters() -> None:
    """Without dimensions, empty, of several types in one group, shared, added later; gradients that have a graph."""
    mean = mean_of_ranks()
    kinds = [torch.zeros(()), torch.zeros(0), torch.zeros(2, dtype=torch.float64), torch.zeros(2, 2).t()]
    for options in ({}, {"groups": 1}, {"groups": 2}):
        weights = [nn.Parameter(each.clone()) for each in kinds]
        shared = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
        shared[1].weight = shared[0].weight
        nn.init.zeros_(shared[0].weight)
        later = nn.Parameter(torch.zeros(2))
        named = [*zip("abcd", weights), *shared.named_parameters(remove_duplicate=False)]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([*weights, *shared.parameters()], lr=1.0), named_parameters=iter(named), **options
        )
        optimizer.add_param_group({"params": [later], "lr": 2.0})
        for _ in range(2):
            optimizer.zero_grad()
            everything = [*weights, shared[0].weight, shared[1].weight, later]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the cycle that create_graph=True makes
                (sum(each.sum() for each in everything) * (2.0 + 2.0 * hvd.rank())).backward(create_graph=True)
            optimizer.step()
        for weight, factor in [*((each, 1) for each in weights), (shared[0].weight, 2), (later, 2)]:
            torch.testing.assert_close(weight.detach(), torch.full_like(weight, -2.0 * factor * mean).detach())


def check_parameters_that_come_twice() -> None:
    """PyTorch warns of a parameter that is in a group twice, and steps twice."""
    weight, single = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, alone = (torch.optim.SGD([each, each], lr=1.0) for each in (weight, single))
    for options in ({}, {"groups": 2}):
        optimizer = hvd.DistributedOptimizer(plain, **options)
        optimizer.zero_grad()
        pull(weight).backward()
        optimizer.step()
        single.grad = torch.full((1,), mean_of_ranks())
        alone.step()
        torch.testing.assert_close(weight, single)


def main() -> None:
    """Everything."""
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    checks = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
    for check in checks:
        check()
        hvd.barrier()
    print(f"rank {hvd.rank()} of {hvd.size()}: {len(checks)} checks of steps hold")
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
