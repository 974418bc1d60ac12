"""Runs programs of `ronde.torch` on one rank: collectives with gradients, gradcheck, and SyncBatchNorm."""

from __future__ import annotations

from typing import Any, Callable

import torch

import ronde.torch as hvd
from differential import torch_training
from differential.c10d_worker import failure, groups_of
from differential.tensors import make, packed
from differential.torch_reference import BEFORE, ScaledGradient, convention, loss_of, penalty_of, weight_of
from ronde.frameworks import basics

Fields = dict[str, Any]


class TorchRank:
    """This process as a rank of `ronde.torch`."""

    backend = "torch"

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = -1
        self._sets: list[Any] = []

    def begin(self) -> None:
        """Begins a session with process sets."""
        groups = groups_of(self.size)
        distinct = [ranks for number, ranks in enumerate(groups) if ranks not in groups[:number]]
        made = {tuple(ranks): hvd.ProcessSet(ranks) for ranks in distinct[1:]}
        hvd.init(process_sets=list(made.values()))
        made[tuple(groups[0])] = hvd.global_process_set
        self._sets = [made[tuple(ranks)] for ranks in groups]
        self.rank = hvd.rank()

    def reset(self, timeout_s: float) -> None:
        """Another session."""
        hvd.shutdown()
        self.begin()

    def run(self, program: Fields) -> Fields:
        """What this rank sees of a program."""
        members = groups_of(self.size)[program["group"]]
        process_set = self._sets[program["group"]]
        if program["kind"] == "training":
            return _guarded(lambda: torch_training.on_ranks(program, self.rank, self.size, process_set))
        if self.rank not in members:
            return {}
        fields = {**program, **program.get("by_rank", {}).get(str(self.rank), {})}
        if program["kind"] == "gradcheck":
            return _guarded(lambda: _gradcheck(fields, self.rank, members, process_set))
        return _guarded(lambda: _collective(fields, self.rank, process_set))


def _guarded(run: Callable[[], Fields]) -> Fields:
    try:
        return run()
    except Exception as error:
        return {"error": failure(error)}


def _collective(fields: Fields, rank: int, process_set: Any) -> Fields:
    """Results, gradients and second gradients of one collective; `torch_reference.py` computes the same."""
    leaves = leaves_of(fields, rank)
    if fields["call"] == "batch_norm":
        return _batch_norm(fields, rank, leaves)
    given = [BEFORE[fields["before"]](leaf) for leaf in leaves]
    results, more = perform(fields, given, process_set)
    found: Fields = {"results": [packed(each) for each in results], "more": more}
    if fields["orders"] > 0:
        found.update(gradients(fields, rank, leaves, results))
    return found


def leaves_of(fields: Fields, rank: int) -> list[torch.Tensor]:
    """The tensors of a rank; with gradients they are leaves of a graph."""
    specs = fields["tensors"]
    return [
        make({**spec, "grad": fields["orders"] > 0}, fields["seed"], index, rank)[0] for index, spec in enumerate(specs)
    ]


def gradients(fields: Fields, rank: int, leaves: list[torch.Tensor], results: list[torch.Tensor]) -> Fields:
    """Of a loss of the results, and of a penalty on that gradient."""
    weights = [weight_of(fields["seed"], index, rank, each) for index, each in enumerate(results)]
    loss = loss_of(results, weights)
    first = torch.autograd.grad(loss, leaves, create_graph=fields["orders"] > 1)
    found: Fields = {"first": [packed(each) for each in first]}
    if fields["orders"] > 1:
        options = {"allow_unused": True, "materialize_grads": True}
        second = torch.autograd.grad(penalty_of(first, rank), [*leaves, *weights], **options)
        found["second"] = [packed(each) for each in second]
    return found


def perform(fields: Fields, given: list[torch.Tensor], process_set: Any) -> tuple[list[torch.Tensor], Any]:
    """Calls the collective in the form that the program selects."""
    call, form = fields["call"], fields.get("form", "sync")
    options: dict[str, Any] = {"process_set": process_set}
    if "op" in fields:
        options.update(op=getattr(hvd, fields["op"]))
        options.update(prescale_factor=fields["prescale"], postscale_factor=fields["postscale"])
    if fields.get("compression") and form == "sync":
        options["compression"] = getattr(hvd.Compression, fields["compression"])
    if call == "broadcast":
        options["root_rank"] = fields["root"]
    if fields.get("splits") is not None:
        options["splits"] = torch.tensor(fields["splits"], dtype=torch.int32)
    argument: Any = given[0]
    if call.startswith("grouped"):
        containers: dict[str, Callable[[Any], Any]] = {"list": list, "tuple": tuple, "generator": iter}
        argument = containers[fields["container"]](given)
    if form == "sync":
        result = getattr(hvd, call)(argument, **options)
    elif form == "async":
        result = hvd.synchronize(getattr(hvd, f"{call}_async")(argument, **options))
    elif form == "in_place":
        result = getattr(hvd, f"{call}_")(argument, **options)
    else:
        result = hvd.synchronize(getattr(hvd, f"{call}_async_")(argument, **options))
    more = None
    if call == "alltoall" and (form != "sync" or fields.get("splits") is not None):
        result, more = result[0], result[1].tolist()
    if "place" in form:
        same = zip(given, result if isinstance(result, (list, tuple)) else [result])
        assert all(one.data_ptr() == other.data_ptr() for one, other in same), "the result is not in its place"
    return (list(result) if isinstance(result, (list, tuple)) else [result]), more


def _batch_norm(fields: Fields, rank: int, leaves: list[torch.Tensor]) -> Fields:
    given = leaves[0]
    made = hvd.SyncBatchNorm(
        given.shape[1], momentum=fields["momentum"], affine=fields["affine"], track_running_stats=fields["track"]
    ).to(given.dtype)
    made.train(fields["training"])
    if fields["affine"]:
        with torch.no_grad():
            made.weight.copy_(torch.linspace(0.5, 1.5, given.shape[1]))
            made.bias.copy_(torch.linspace(-1.0, 1.0, given.shape[1]))
    result = made(BEFORE[fields["before"]](given))
    result = made(result) if fields["twice"] else result
    found: Fields = {"results": [packed(result)], "more": None}
    found["state"] = [None if value is None else packed(value) for value in (made.running_mean, made.running_var)]
    parameters = [made.weight, made.bias] if fields["affine"] else []
    found.update(gradients(fields, rank, [given, *parameters], [result]))
    return found


def _gradcheck(fields: Fields, rank: int, members: list[int], process_set: Any) -> Fields:
    """torch.autograd.gradcheck and gradgradcheck of the function of all ranks' tensors to all ranks' results.

    Every rank checks the whole function and perturbs the same element at the same time: `_Pick` takes a rank's part of
    all inputs, `_Share` gives all ranks the results of all. Each is the exact adjoint of the other, so what is checked
    is the collective alone. First gradients by Horovod's convention are a multiple of the true ones (`convention`),
    which is divided out.
    """
    every = [{**fields, **fields.get("by_rank", {}).get(str(each), {})} for each in members]
    shapes = [[list(spec["shape"]) for spec in each["tensors"]] for each in every]
    here = members.index(rank)
    sizes = [sum(torch.Size(shape).numel() for shape in own) for own in shapes]
    inputs = [
        make({**spec, "grad": False}, fields["seed"], index, member)[0].reshape(-1)
        for member, each in zip(members, every)
        for index, spec in enumerate(each["tensors"])
    ]
    whole = torch.cat(inputs).requires_grad_()
    factor = 1.0 / convention(fields["call"], fields.get("op"), len(members))
    client, job_set = basics.client(), process_set._members if process_set is not hvd.global_process_set else None

    def share(mine: torch.Tensor) -> torch.Tensor:
        shared: torch.Tensor = client.allgather(mine.detach(), process_set=job_set)
        return shared

    def function(everything: torch.Tensor) -> torch.Tensor:
        mine = _Pick.apply(everything, sum(sizes[:here]), sizes[here], share)
        counts = [torch.Size(shape).numel() for shape in shapes[here]]
        given = [part.reshape(shape) for part, shape in zip(mine.split(counts), shapes[here])]
        # Right before the collective, so that each pass through it is corrected once.
        results, _ = perform(fields, [ScaledGradient.apply(each.sin(), factor) for each in given], process_set)
        parts = [each.reshape(-1) for each in results]
        # torch.cat has no gradient for an empty part, so that a rank would leave out a collective.
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        ends = client.allgather(torch.tensor([flat.numel()]), process_set=job_set).cumsum(0)
        shared: torch.Tensor = _Share.apply(flat, int(ends[here]) - flat.numel(), flat.numel(), share)
        return shared

    torch.autograd.gradcheck(function, (whole,))
    if fields["orders"] > 1:
        torch.autograd.gradgradcheck(function, (whole,))
    return {"checked": True}


class _Pick(torch.autograd.Function):
    """A rank's part of what all ranks have."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, start: int, count: int, share: Any) -> torch.Tensor:
        ctx.place = (start, count, share)
        return whole[start : start + count].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Share.apply(gradients[0], *ctx.place), None, None, None


class _Share(torch.autograd.Function):
    """All ranks' parts, one after the other, on each rank."""

    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, start: int, count: int, share: Any) -> torch.Tensor:
        ctx.place = (start, count, share)
        shared: torch.Tensor = share(mine)
        return shared

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _Pick.apply(gradients[0], *ctx.place), None, None, None
