"""Run by every rank: gradients of first to third order of the collectives, against one process with all ranks' tensors.

Horovod's rules give the gradient of an all-gather and a broadcast for the average of all ranks' losses, that of a
reduce-scatter for n times their sum, and all others for their sum. The reference has this factor of the first gradient
in the same place: as that of a function whose value does not have it.
"""

from __future__ import annotations

import sys
from typing import Any, Callable

import torch
from torch import nn

import ronde.torch as hvd

Tensors = list  # of tensors
ORDERS = 3


def inputs(rank: int, rows: int) -> torch.Tensor:
    """A rank's tensor, which each rank can make."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(rows, 2, dtype=torch.float64, generator=generator).requires_grad_()


def weights(like: torch.Tensor, seed: int) -> torch.Tensor:
    """Fixed numbers of the same shape."""
    return torch.randn(like.shape, dtype=like.dtype, generator=torch.Generator().manual_seed(seed))


def loss_of(x: torch.Tensor, y: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's loss, with derivatives of all orders."""
    return (weights(y, rank) * torch.sin(y) * y).sum() + (weights(x, 50 + rank) * torch.exp(x)).sum()


def derivatives(losses: Tensors, xs: Tensors, ranks: list[int]) -> list[Tensors]:
    """The gradients, those of their weighted sum, and so on, each of these as functions of all ranks' tensors."""
    found = []
    total = torch.stack(losses).sum()
    for order in range(ORDERS):
        grads = torch.autograd.grad(total, xs, create_graph=True)
        found.append([grad.detach() for grad in grads])
        total = torch.stack([(weights(g, 10 * order + r) * g.square()).sum() for g, r in zip(grads, ranks)]).sum()
    return found


def with_factor(y: torch.Tensor, factor: float) -> torch.Tensor:
    """The same value; derivatives have the factor."""
    return factor * y + (1 - factor) * y.detach()


class Case:
    """A collective, what it gives in one process for all ranks, and the factor of its gradient.

    together -- of this rank's tensor and a name or None, this rank's result
    alone    -- of all ranks' tensors, all ranks' results
    """

    def __init__(
        self,
        rows: Callable[[int], int],
        together: Callable[[torch.Tensor, str | None], torch.Tensor],
        alone: Callable[[Tensors], Tensors],
        factor: float = 1.0,
    ) -> None:
        self.rows, self.together, self.alone, self.factor = rows, together, alone, factor


def split_rows(total: torch.Tensor, size: int) -> Tensors:
    """As reduce-scatter divides them."""
    each, more = divmod(total.shape[0], size)
    return list(total.split([each + (rank < more) for rank in range(size)]))


def exchanged(xs: Tensors, splits: list[list[int]]) -> Tensors:
    """An all-to-all of rows."""
    parts = [x[: sum(rows)].split(rows) for x, rows in zip(xs, splits)]
    return [torch.cat([part[rank] for part in parts]) for rank in range(len(xs))]


SCALES: dict[str, float] = {"prescale_factor": 0.5, "postscale_factor": 3.0}


def pairs(group: Callable[[Tensors, Any], Tensors]) -> Callable[..., torch.Tensor]:
    """A grouped collective of a tensor in two parts."""
    return lambda x, name: torch.cat(group([x[:1], x[1:] * 2.0], name))


def total(xs: Tensors) -> torch.Tensor:
    """The sum."""
    return torch.stack(xs).sum(0)


def cases(size: int, **of: Any) -> dict[str, Case]:
    """All collectives that have gradients; `of` names a process set of that size."""
    n = size
    root = (of["process_set"].ranks if of else range(n))[-1]
    uneven = [[(giver + taker) % 3 for taker in range(n)] for giver in range(n)]
    me = of["process_set"].rank() if of else hvd.rank()

    def stacked(xs: Tensors) -> Tensors:
        return [torch.cat([torch.cat([x[:1] for x in xs]), torch.cat([x[1:] * 2.0 for x in xs])])] * n

    found = {
        "allreduce sum": Case(
            lambda r: 3, lambda x, m: hvd.allreduce(x, name=m, op=hvd.Sum, **of), lambda xs: [total(xs)] * n
        ),
        "allreduce average": Case(
            lambda r: 3, lambda x, m: hvd.allreduce(x, name=m, **of), lambda xs: [total(xs) / n] * n
        ),
        "allreduce scaled": Case(
            lambda r: 3,
            lambda x, m: hvd.allreduce(x, name=m, op=hvd.Sum, **SCALES, **of),
            lambda xs: [total(xs) * 1.5] * n,
        ),
        "grouped_allreduce": Case(
            lambda r: 3,
            pairs(lambda parts, m: hvd.grouped_allreduce(parts, name=m, op=hvd.Sum, **of)),
            lambda xs: [torch.cat([total(xs)[:1], total(xs)[1:] * 2.0])] * n,
        ),
        "allgather": Case(
            lambda r: 1 + r % 3, lambda x, m: hvd.allgather(x, name=m, **of), lambda xs: [torch.cat(xs)] * n, 1 / n
        ),
        "allgather, nothing from the first": Case(
            lambda r: 2 * r, lambda x, m: hvd.allgather(x, name=m, **of), lambda xs: [torch.cat(xs)] * n, 1 / n
        ),
        "grouped_allgather": Case(
            lambda r: 1 + r, pairs(lambda parts, m: hvd.grouped_allgather(parts, name=m, **of)), stacked, 1 / n
        ),
        "broadcast": Case(
            lambda r: 2, lambda x, m: hvd.broadcast(x, root, name=m, **of), lambda xs: [xs[-1]] * n, 1 / n
        ),
        "alltoall": Case(
            lambda r: n * (1 + r),
            lambda x, m: hvd.alltoall(x, name=m, **of),
            lambda xs: exchanged(xs, [[1 + rank] * n for rank in range(n)]),
        ),
        "alltoall with splits": Case(
            lambda r: 1 + sum(uneven[r]),
            lambda x, m: hvd.alltoall(x, (each for each in uneven[me]), name=m, **of)[0],
            lambda xs: exchanged(xs, uneven),
        ),
    }
    return {**found, **scatter_cases(size, **of)}


def scatter_cases(n: int, **of: Any) -> dict[str, Case]:
    """Reduce-scatter, whose gradient has a factor of its own."""
    found = {}
    for name, op, factor in (("sum", hvd.Sum, 1.0), ("average", hvd.Average, 1 / n)):
        scaled = 1.5 * factor
        found[f"reducescatter {name}"] = Case(
            lambda r: 2 * n + 1,
            lambda x, m, op=op: hvd.reducescatter(x, name=m, op=op, **SCALES, **of),  # type: ignore[misc]
            lambda xs, by=scaled: split_rows(total(xs) * by, n),  # type: ignore[misc]
            n,
        )
        found[f"grouped_reducescatter {name}"] = Case(
            lambda r: n + 1,
            pairs(lambda parts, m, op=op: hvd.grouped_reducescatter(parts, name=m, op=op, **of)),  # type: ignore[misc]
            lambda xs, by=factor: [  # type: ignore[misc]
                torch.cat(pair)
                for pair in zip(split_rows(total(xs)[:1] * by, n), split_rows(total(xs)[1:] * (2 * by), n))
            ],
            n,
        )
    return found


def check_case(case: Case, size: int, me: int, name: str | None) -> None:
    """Values and derivatives."""
    ranks = list(range(size))
    xs = [inputs(rank, case.rows(rank)) for rank in ranks]
    ys = case.alone(xs)
    losses = [loss_of(x, with_factor(y, case.factor), rank) for x, y, rank in zip(xs, ys, ranks)]
    expected = derivatives(losses, xs, ranks)
    mine = inputs(me, case.rows(me))
    result = case.together(mine, name)
    torch.testing.assert_close(result, ys[me])
    for order, (found, wanted) in enumerate(zip(derivatives([loss_of(mine, result, me)], [mine], [me]), expected)):
        torch.testing.assert_close(found[0], wanted[me], rtol=1e-9, atol=1e-9, msg=lambda m, o=order: f"{o}: {m}")


def check_all_orders() -> None:
    """Every collective, with and without a name."""
    size = hvd.size()
    for what, case in cases(size).items():
        for name in (None, f"named {what}"):
            try:
                check_case(case, size, hvd.rank(), name)
            except AssertionError as error:
                raise AssertionError(f"{what}, name {name}: {error}") from error


def check_process_sets() -> None:
    """The same among some of the ranks."""
    some = hvd.add_process_set(rank for rank in range(hvd.size()) if rank != 0 or hvd.size() == 1)
    assert some.ranks == list(range(1 if hvd.size() > 1 else 0, hvd.size()))
    if some.included():
        for what, case in cases(len(some.ranks), process_set=some).items():
            try:
                check_case(case, len(some.ranks), int(some.rank() or 0), None)
            except AssertionError as error:
                raise AssertionError(f"{what} in {some.ranks}: {error}") from error
    hvd.barrier()
    assert hvd.remove_process_set(some)


def check_adjoints() -> None:
    """A backward pass is linear in all ranks' upstream gradients, and its own gradient is its exact adjoint."""
    size, me = hvd.size(), hvd.rank()

    def over_all(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return hvd.allreduce((a * b).sum().detach(), op=hvd.Sum)

    for what, case in cases(size).items():
        x = inputs(me, case.rows(me))
        y = case.together(x, None)
        v = weights(y, me).requires_grad_()
        (g,) = torch.autograd.grad(y, x, grad_outputs=v, create_graph=True)
        w = weights(g, 20 + me).requires_grad_()
        (back,) = torch.autograd.grad(g, v, grad_outputs=w, create_graph=True)
        torch.testing.assert_close(over_all(w, g), over_all(back, v), msg=f"{what}: the adjoint")
        z = weights(back, 30 + me)
        (again,) = torch.autograd.grad(back, w, grad_outputs=z)
        y = case.together(x, None)
        (expected,) = torch.autograd.grad(y, x, grad_outputs=z)
        torch.testing.assert_close(again, expected, msg=f"{what}: the adjoint's adjoint")


def check_the_issue() -> None:
    """Squares, all-reduced and squared again: the second derivative is 48 x squared on two ranks."""
    size = hvd.size()
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    (g,) = torch.autograd.grad(hvd.allreduce(x * x, op=hvd.Sum).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(g.sum(), x)
    torch.testing.assert_close(second, 12.0 * size * size * x.detach().square())


def check_no_second_gradient() -> None:
    """Reductions that are not linear keep Horovod's first gradient; the second is refused, as reducescatter's first."""
    for op in (hvd.Min, hvd.Max, hvd.Product):
        x = torch.ones(2, requires_grad=True)
        (g,) = torch.autograd.grad(hvd.allreduce(x, op=op).exp().sum(), x, create_graph=True)
        (h,) = torch.autograd.grad(sum(hvd.grouped_allreduce([x, x], op=op)).exp().sum(), x, create_graph=True)
        power = hvd.size() if op == hvd.Product else 1
        torch.testing.assert_close(g.detach(), torch.ones(2).exp() ** power)
        torch.testing.assert_close(h.detach(), 2 * (2 * torch.ones(2)).exp() ** power)
        for gradient in (g, h):
            refused(lambda gradient=gradient: gradient.sum().backward(), "cannot be differentiated again")
        if hvd.size() > 1:
            rows = torch.ones(hvd.size(), 2, requires_grad=True)
            refused(lambda op=op, rows=rows: hvd.reducescatter(rows, op=op).sum().backward(), "has no gradient")


def refused(call: Callable[[], Any], text: str) -> None:
    """Raises RuntimeError with this text."""
    try:
        call()
    except RuntimeError as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing was raised that contains {text}")


def check_uneven_alltoall() -> None:
    """Without splits and with different numbers of rows: ones come back for ones."""
    x = torch.ones(hvd.size() * (1 + hvd.rank()), 2, requires_grad=True)
    hvd.alltoall(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(x))


def check_alltoall_async() -> None:
    """The handle's result is a pair, also without splits."""
    size, rank = hvd.size(), hvd.rank()
    x = torch.full((size * (1 + rank),), float(rank))
    output, received = hvd.synchronize(hvd.alltoall_async(x))
    expected = torch.arange(1, size + 1, dtype=torch.int32)
    torch.testing.assert_close(received, expected)
    torch.testing.assert_close(output, torch.repeat_interleave(torch.arange(float(size)), expected))
    assert isinstance(hvd.alltoall(x), torch.Tensor)
    output, received = hvd.synchronize(hvd.alltoall_async(x, iter([1 + rank] * size)))
    torch.testing.assert_close(received, expected)


def check_generators() -> None:
    """Grouped calls read any iterable once."""
    size, rank = hvd.size(), hvd.rank()
    totals = [float(sum(range(size))) + size * k for k in range(3)]

    def made() -> Any:
        return (torch.full((size, 2), float(rank + k)) for k in range(3))

    for reduced in (
        hvd.grouped_allreduce(made(), op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async(made(), op=hvd.Sum)),
        hvd.grouped_allreduce_(made(), op=hvd.Sum),
        hvd.synchronize(hvd.grouped_allreduce_async_(made(), op=hvd.Sum)),
        hvd.grouped_allreduce(dict(enumerate(made())).values(), op=hvd.Sum),
        hvd.grouped_allreduce(made(), op=hvd.Sum, compression=hvd.Compression.bf16),
    ):
        assert [float(each[0, 0]) for each in reduced] == totals, reduced
    places = [torch.full((2,), float(rank + k)) for k in range(3)]
    results = hvd.grouped_allreduce_((place for place in places), op=hvd.Sum)
    assert all(result is place for result, place in zip(results, places))
    assert [float(place[0]) for place in places] == totals
    for gathered in (hvd.grouped_allgather(made()), hvd.synchronize(hvd.grouped_allgather_async(made()))):
        assert [each.shape for each in gathered] == [(size * size, 2)] * 3
    for rows in (
        hvd.grouped_reducescatter(made(), op=hvd.Sum),
        hvd.synchronize(hvd.grouped_reducescatter_async(made(), op=hvd.Sum)),
    ):
        assert [float(each[0, 0]) for each in rows] == totals
    x = torch.ones(2, requires_grad=True)
    torch.stack(hvd.grouped_allreduce((x * k for k in range(3)), op=hvd.Sum)).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((2,), 3.0 * size))


def check_forms_of_tensors() -> None:
    """Views, transposed, expanded, of no dimension, empty, of several types at once, and without gradients."""
    size = hvd.size()
    base = torch.arange(12.0, dtype=torch.float64).reshape(3, 4)
    for view in (base.t(), base[:, ::2], base[1:2].expand(3, 4), base[0, 0], base[:0], -base, base.to(torch.float16)):
        x = view.clone(memory_format=torch.preserve_format).requires_grad_()
        given = torch.zeros_like(x) + x
        result = hvd.allreduce(given, op=hvd.Sum)
        torch.testing.assert_close(result.detach(), view.detach() * size, check_stride=False)
        result.sum().backward()
        torch.testing.assert_close(x.grad, torch.full_like(x, float(size)), check_stride=False)
    for view in (base.t(), base[:, ::2], base[1:2].expand(3, 4), base[:0]):
        x = (view * 1.0).requires_grad_()
        hvd.allgather(x.t().t()).sum().backward()
        torch.testing.assert_close(x.grad, torch.ones_like(x))
    kinds = (torch.float32, torch.float64, torch.int64, torch.float16)
    xs = [torch.ones(2, dtype=kind, requires_grad=kind.is_floating_point) for kind in kinds]
    results = hvd.grouped_allreduce(xs, op=hvd.Sum)
    assert [(each.dtype, each.requires_grad) for each in results] == [(x.dtype, x.requires_grad) for x in xs]
    (results[0].sum() + results[1].sum()).backward()
    torch.testing.assert_close(xs[0].grad, torch.full((2,), float(size)))
    torch.testing.assert_close(xs[3].grad, torch.zeros(2, dtype=torch.float16), msg="its result was not used")
    with torch.no_grad():
        assert not hvd.allreduce(torch.ones(1, requires_grad=True)).requires_grad
    assert not hvd.allgather(torch.ones(1, 1)).requires_grad


def check_results_in_place() -> None:
    """Autograd refuses to use a tensor that was overwritten after it was saved for a gradient."""
    for write in (
        lambda x: hvd.allreduce_(x, op=hvd.Sum),
        lambda x: hvd.grouped_allreduce_([x], op=hvd.Sum),
        lambda x: hvd.broadcast_(x, root_rank=0),
        lambda x: hvd.broadcast_parameters({"x": x}, root_rank=0),
        lambda x: hvd.synchronize(hvd.allreduce_async_(x, op=hvd.Adasum)) if hvd.size() != 3 else hvd.broadcast_(x, 0),
    ):
        weight, saved = torch.ones(2, requires_grad=True), torch.ones(2)
        product = (weight * saved).sum()
        write(saved)
        refused(product.backward, "modified by an inplace operation")
    with torch.inference_mode():
        hvd.allreduce_(torch.ones(2))


def whole_batch_norm(options: dict[str, Any], rows: list[int]) -> tuple[list[torch.Tensor], nn.Module]:
    """The plain one and everybody's rows."""
    torch.manual_seed(3)
    plain = nn.BatchNorm1d(3, **options).double()
    if plain.affine:
        nn.init.normal_(plain.weight)
        nn.init.normal_(plain.bias)
    return [torch.randn(each, 3, dtype=torch.float64).requires_grad_() for each in rows], plain


def normalized(xs: Tensors, parameters: list[Tensors], eps: float) -> Tensors:
    """What all ranks compute in training, each with weight and bias of its own, with derivatives of all orders."""
    centered = torch.cat(xs) - torch.cat(xs).mean(0)
    whole = centered / torch.sqrt(centered.square().mean(0) + eps)
    parts = whole.split([x.shape[0] for x in xs])
    return [part * own[0] + own[1] if own else part for part, own in zip(parts, parameters)]


def check_batch_norm_twice() -> None:
    """Derivatives of SyncBatchNorm up to the third order, of all ranks' inputs and of each rank's weight and bias."""
    size, me = hvd.size(), hvd.rank()
    rows = [2 + each % 3 for each in range(size)]
    for options in ({}, {"affine": False}, {"track_running_stats": False}):
        xs, plain = whole_batch_norm(options, rows)
        synced = hvd.SyncBatchNorm(3, **options).double()
        synced.load_state_dict(plain.state_dict())
        mine = xs[me].detach().clone().requires_grad_()
        result = synced(mine)
        own = list(synced.parameters())
        copies = [[each.detach().clone().requires_grad_() for each in own] for _ in range(size)]
        ys = normalized(xs, copies, plain.eps)
        torch.testing.assert_close(torch.cat(ys), plain(torch.cat(xs)))
        torch.testing.assert_close(result, ys[me])
        # Of inputs and parameters in turn, so that each rank has a part of every weighted sum.
        leaves = [leaf for x, copy in zip(xs, copies) for leaf in (x, *copy)]
        numbers = [rank for rank in range(size) for _ in range(1 + len(own))]
        alone = derivatives([loss_of(x, y, rank) for x, y, rank in zip(xs, ys, range(size))], leaves, numbers)
        together = derivatives([loss_of(mine, result, me)], [mine, *own], [me] * (1 + len(own)))
        first = me * (1 + len(own))
        for found, wanted in zip(together, alone):
            for ours, theirs in zip(found, wanted[first : first + 1 + len(own)]):
                torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-7)


def check_batch_norm_in_evaluation() -> None:
    """Without running statistics those of all ranks' rows count; with them nothing is sent, whoever evaluates."""
    size, me = hvd.size(), hvd.rank()
    rows = [2 + each % 3 for each in range(size)]
    xs, plain = whole_batch_norm({"track_running_stats": False}, rows)
    synced = hvd.SyncBatchNorm(3, track_running_stats=False).double()
    synced.load_state_dict(plain.state_dict())
    torch.testing.assert_close(synced.eval()(xs[me]), plain.eval()(torch.cat(xs)).split(rows)[me])
    xs, plain = whole_batch_norm({}, rows)
    synced = hvd.SyncBatchNorm(3).double()
    synced.load_state_dict(plain.state_dict())
    if me == 0:
        torch.testing.assert_close(synced.eval()(xs[me]), plain.eval()(xs[me]))
    synced.train()
    synced.track_running_stats = False
    synced(xs[me])
    assert synced.running_mean is not None
    assert not synced.running_mean.any(), "statistics were tracked where they are not to be"


def main() -> None:
    """Everything."""
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    checks = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
    checks.remove(check_case)  # what others call
    for check in checks:
        check()
        hvd.barrier()
    print(f"rank {hvd.rank()} of {hvd.size()}: {len(checks)} checks of gradients hold")
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
