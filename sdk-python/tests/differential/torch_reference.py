"""Computes expected results of programs of `ronde.torch`: all ranks in one process, with PyTorch's operations."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

from differential.c10d_worker import groups_of
from differential.tensors import make, packed

Fields = dict[str, Any]
Tensors = list[torch.Tensor]

# What is done to a tensor before the collective, so that second gradients do not vanish.
BEFORE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nothing": lambda tensor: tensor,
    "square": torch.square,
    "sine": torch.sin,
    "turned": lambda tensor: (tensor * tensor).flip(0) if tensor.dim() else tensor * tensor,
}


def convention(call: str, op: str | None, size: int) -> float:
    """By what Horovod's first gradient of a collective is a multiple of that of the sum of all ranks' losses."""
    if call in ("allgather", "grouped_allgather", "broadcast"):
        return 1.0 / size
    return float(size) if call in ("reducescatter", "grouped_reducescatter") else 1.0


def weight_of(seed: int, index: int, rank: int, like: torch.Tensor) -> torch.Tensor:
    """What a result is multiplied by in a rank's loss."""
    spec = {"dtype": str(like.dtype).removeprefix("torch."), "shape": list(like.shape), "style": "real", "grad": True}
    return make(spec, seed, "weight", index, rank)[0]


def loss_of(results: Tensors, weights: Tensors) -> torch.Tensor:
    """A rank's loss."""
    return torch.stack([(result.sin() * weight).sum() for result, weight in zip(results, weights)]).sum()


def penalty_of(gradients: Any, rank: int) -> torch.Tensor:
    """A rank's penalty on its gradients."""
    return torch.stack([(each * each).sum() * (rank + 1) for each in gradients]).sum()


def reference(program: Fields, ranks: int) -> list[Fields]:
    """What each rank of a job reports; for ranks outside of the process set nothing."""
    members = groups_of(ranks)[program["group"]]
    every = {rank: {**program, **program.get("by_rank", {}).get(str(rank), {})} for rank in members}
    leaves = {
        rank: [
            make({**spec, "grad": fields["orders"] > 0}, program["seed"], index, rank)[0]
            for index, spec in enumerate(fields["tensors"])
        ]
        for rank, fields in every.items()
    }
    reports: list[Fields] = [{} for _ in range(ranks)]
    if program["call"] == "batch_norm":
        results, more, states, parameters = _batch_norm(program, [leaves[rank] for rank in members])
        for rank, own, state in zip(members, parameters, states):
            leaves[rank] = [*leaves[rank], *own]
            reports[rank]["state"] = state
    else:
        before = BEFORE[program["before"]]
        given = [[before(leaf) for leaf in leaves[rank]] for rank in members]
        results, more = _results(program, list(every.values()), given, members)
    for rank, own, extra in zip(members, results, more):
        reports[rank].update(results=[packed(each) for each in own], more=extra)
    if program["orders"] > 0:
        _differentiate(program, members, leaves, results, reports)
    return reports


def _differentiate(program: Fields, members: list[int], leaves: Any, results: list[Tensors], reports: Any) -> None:
    """First and second gradients of the sum of all ranks' losses and penalties."""
    weights = {
        rank: [weight_of(program["seed"], index, rank, each) for index, each in enumerate(own)]
        for rank, own in zip(members, results)
    }
    loss = torch.stack([loss_of(own, weights[rank]) for rank, own in zip(members, results)]).sum()
    inputs = [leaf for rank in members for leaf in leaves[rank]]
    # A rank whose tensor is not used, such as another than a broadcast's root, has zeros as gradient.
    options = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(loss, inputs, create_graph=program["orders"] > 1, **options)
    by_rank, place = {}, 0
    for rank in members:
        by_rank[rank] = first[place : place + len(leaves[rank])]
        place += len(leaves[rank])
        reports[rank]["first"] = [packed(each) for each in by_rank[rank]]
    if program["orders"] > 1:
        penalty = torch.stack([penalty_of(by_rank[rank], rank) for rank in members]).sum()
        wanted = {rank: [*leaves[rank], *weights[rank]] for rank in members}
        every = [each for own in wanted.values() for each in own]
        # Of results without elements the first gradients depend on nothing.
        flat = torch.autograd.grad(penalty, every, **options) if penalty.requires_grad else map(torch.zeros_like, every)
        flat = list(flat)
        place = 0
        for rank, own in wanted.items():
            second = flat[place : place + len(own)]
            reports[rank]["second"] = [packed(each) for each in second]
            place += len(own)


def _results(
    program: Fields, every: list[Fields], given: list[Tensors], members: list[int]
) -> tuple[list[Tensors], list[Any]]:
    """Each member's results, and what it gets besides."""
    call = program["call"].removeprefix("grouped_")
    factor = convention(call, program.get("op"), len(members))
    if program["orders"] > 0:
        given = [[ScaledGradient.apply(each, factor) for each in own] for own in given]
    if call == "alltoall":
        return _alltoall(every, given)
    columns: list[Tensors] = [list(column) for column in zip(*given)]
    if call == "allreduce":
        made = [_allreduced(program, column) for column in columns]
    elif call == "allgather":
        made = [[torch.cat(column)] * len(members) for column in columns]
    elif call == "broadcast":
        made = [[column[members.index(program["root"])]] * len(members) for column in columns]
    else:
        made = [_scattered(_allreduced(program, column)) for column in columns]
    return [list(own) for own in zip(*made)], [None] * len(members)


def _alltoall(every: list[Fields], given: list[Tensors]) -> tuple[list[Tensors], list[Any]]:
    size = len(every)
    splits = [fields.get("splits") or [own[0].shape[0] // size] * size for fields, own in zip(every, given)]
    parts = [own[0][: sum(rows)].split(rows) for own, rows in zip(given, splits)]
    received = [[rows[here] for rows in splits] for here in range(size)]
    results = [[torch.cat([mine[here] for mine in parts])] for here in range(size)]
    returns_splits = every[0].get("splits") is not None or every[0].get("form", "sync") != "sync"
    return results, received if returns_splits else [None] * size


def _scattered(reduced: Tensors) -> Tensors:
    """Each rank's rows of its own copy; the first ranks have one more where they do not divide."""
    size = len(reduced)
    each, more = divmod(reduced[0].shape[0], size)
    rows = [each + (rank < more) for rank in range(size)]
    return [whole.split(rows)[rank] for rank, whole in enumerate(reduced)]


def _allreduced(program: Fields, column: Tensors) -> Tensors:
    """One result for each rank."""
    stacked = torch.stack(column)
    scales = (program["op"], program["prescale"], program["postscale"])
    if program["orders"] > 0:
        return list(_Reduced.apply(stacked, *scales).unbind())
    return list(_reduced(stacked, *scales).unbind())


def _reduced(stacked: torch.Tensor, op: str, prescale: float, postscale: float) -> torch.Tensor:
    """In float64 or int64, cast at the end, as often as there are ranks."""
    dtype, size = stacked.dtype, stacked.shape[0]
    if dtype == torch.bool:
        whole = stacked.any(0) if op in ("Sum", "Max") else stacked.all(0)
        return whole.expand(stacked.shape).clone()
    wide = stacked.to(torch.float64 if dtype.is_floating_point else torch.int64)
    if dtype.is_floating_point:
        wide = wide * prescale
    if op == "Average":
        whole = wide.sum(0) / size if dtype.is_floating_point else wide.sum(0).div(size, rounding_mode="trunc")
    elif op == "Sum":
        whole = wide.sum(0)
    elif op == "Product":
        whole = wide.prod(0)
    else:
        whole = functools.reduce(torch.minimum if op == "Min" else torch.maximum, wide.unbind())
    if dtype.is_floating_point:
        whole = whole * postscale
    return whole.to(dtype).expand(stacked.shape).clone()


class _Reduced(torch.autograd.Function):
    """The reduction for each rank. The gradients of all ranks are reduced the same way, as Horovod does it."""

    @staticmethod
    def forward(ctx: Any, stacked: torch.Tensor, op: str, prescale: float, postscale: float) -> torch.Tensor:
        ctx.options = (op, prescale, postscale)
        return _reduced(stacked, op, prescale, postscale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Reduced.apply(gradients[0], *ctx.options), None, None, None


class ScaledGradient(torch.autograd.Function):
    """The tensor; its gradient is multiplied by a convention's factor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor, None


def _batch_norm(program: Fields, leaves: list[Tensors]) -> tuple[list[Tensors], list[Any], list[Any], list[Tensors]]:
    """Batch normalization of all ranks' rows together; each rank has weight and bias of its own."""
    channels, dtype = leaves[0][0].shape[1], leaves[0][0].dtype
    parameters: list[Tensors] = [[] for _ in leaves]
    if program["affine"]:
        parameters = [
            [
                torch.linspace(0.5, 1.5, channels).to(dtype).requires_grad_(),
                torch.linspace(-1.0, 1.0, channels).to(dtype).requires_grad_(),
            ]
            for _ in leaves
        ]
    given = [BEFORE[program["before"]](own[0]) for own in leaves]
    mean = torch.zeros(channels, dtype=dtype) if program["track"] else None
    variance = torch.ones(channels, dtype=dtype) if program["track"] else None
    for number in range(2 if program["twice"] else 1):
        factor = program["momentum"] if program["momentum"] is not None else 1.0 / (number + 1)
        rows = [each.shape[0] for each in given]
        whole = torch.nn.functional.batch_norm(
            torch.cat(given), mean, variance, training=program["training"] or mean is None, momentum=factor
        )
        given = [
            part * _channels(own[0], part) + _channels(own[1], part) if own else part
            for part, own in zip(whole.split(rows), parameters)
        ]
    state = [None if value is None else packed(value) for value in (mean, variance)]
    return [[each] for each in given], [None] * len(leaves), [state] * len(leaves), parameters


def _channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.reshape(1, -1, *[1] * (like.dim() - 2))
