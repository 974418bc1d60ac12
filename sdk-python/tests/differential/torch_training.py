"""Training by `DistributedOptimizer`, on ranks of ronde and in one process that computes the gradients of all ranks."""

from __future__ import annotations

import contextlib
import copy
from typing import Any, Callable

import torch

from differential.c10d_worker import groups_of
from differential.tensors import make, packed

Fields = dict[str, Any]
Gradients = list[Any]

# Name of a class of torch.optim: its arguments. Steps are large, so that a wrong gradient is seen.
OPTIMIZERS: dict[str, Fields] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.05},
    "AdamW": {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1},
    "Adamax": {"lr": 0.05},
    "NAdam": {"lr": 0.05},
    "RAdam": {"lr": 0.05},
    "Adadelta": {"lr": 1.0},
    "Adagrad": {"lr": 0.1},
    "Adafactor": {"lr": 0.05},
    "ASGD": {"lr": 0.05},
    "Rprop": {"lr": 0.02},
    "RMSprop": {"lr": 0.02, "momentum": 0.5, "centered": True},
    "SparseAdam": {"lr": 0.05},
    "LBFGS": {"lr": 0.5, "max_iter": 3, "line_search_fn": "strong_wolfe"},
    "Muon": {"lr": 0.05},
}
# Those that take sparse gradients.
SPARSE = ("SGD", "SparseAdam", "Adagrad")


class Net(torch.nn.Module):
    """A small network with an embedding, a layer that is used twice, a frozen parameter and one that may be unused."""

    def __init__(self, program: Fields) -> None:
        super().__init__()
        self.program = program
        self.embedding = torch.nn.Embedding(7, 4, sparse=program["sparse"])
        self.first = torch.nn.Linear(4, 6)
        self.twice = torch.nn.Linear(6, 6)
        self.extra = torch.nn.Linear(6, 3)
        self.last = torch.nn.Linear(6, 3)
        self.frozen = torch.nn.Parameter(torch.ones(6), requires_grad=not program["frozen"])

    def forward(self, rank: int, step: int) -> torch.Tensor:
        """The loss of a rank's own rows."""
        key = (self.program["seed"], "rows", rank, step)
        rows = make({"dtype": "float64", "shape": [5, 4], "style": "real"}, *key)[0]
        words = make({"dtype": "int64", "shape": [5], "style": "whole"}, *key)[0]
        hidden = torch.tanh(self.first(rows + self.embedding(words))) * self.frozen
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(hidden))))
        result = self.last(hidden)
        is_used = {"never": True, "all": False, "some": rank % 2 == 0}[self.program["unused"]]
        if is_used:
            result = result + self.extra(hidden)
        return (result - rows[:, :3]).square().mean()


def build(program: Fields, rank: int) -> Net:
    """A network whose weights depend on the rank."""
    torch.manual_seed(program["seed"] * 100 + rank)
    return Net(program).double()


def optimized(net: Net, program: Fields) -> list[torch.nn.Parameter]:
    """What the optimizer is given: all parameters, but of some optimizers those that they take."""
    if program["optimizer"] == "SparseAdam":
        return [net.embedding.weight]
    if program["optimizer"] == "Muon":
        return [net.first.weight, net.twice.weight, net.last.weight, net.extra.weight]
    return list(net.parameters())


def optimizer_of(net: Net, program: Fields) -> torch.optim.Optimizer:
    """An optimizer of torch.optim, with one group of parameters or two."""
    parameters = optimized(net, program)
    kind: Any = getattr(torch.optim, program["optimizer"])
    options = OPTIMIZERS[program["optimizer"]]
    if program["two_groups"] and len(parameters) > 2:
        half = len(parameters) // 2
        made = kind([{"params": parameters[:half]}], **options)
        made.add_param_group({"params": parameters[half:], "lr": options["lr"] / 2})
    else:
        made = kind(parameters, **options)
    assert isinstance(made, torch.optim.Optimizer)
    return made


def report(net: Net, optimizer: Any) -> Fields:
    """What training has led to. Of parameters that the optimizer does not have, gradients are local."""
    state = optimizer.state_dict()["state"]
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {
        "parameters": {name: packed(value) for name, value in net.named_parameters()},
        "gradients": {name: value.grad is not None for name, value in net.named_parameters() if id(value) in owned},
        "state": {f"{index}.{key}": _state(value) for index, own in state.items() for key, value in own.items()},
    }


def _state(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return packed(value.to_dense())
    return [_state(each) for each in value] if isinstance(value, (list, tuple)) else value


class Loop:
    """The loop that users write, around whatever computes the gradients.

    evaluate    -- computes the gradients of the passes of a step and returns the loss
    synchronize -- reduces them before the step, where the program reads them
    skipping    -- a context for a step whose gradients are reduced already
    """

    def __init__(
        self,
        program: Fields,
        net: Net,
        optimizer: Any,
        evaluate: Callable[[int, Any], torch.Tensor],
        synchronize: Callable[[], None],
        skipping: Callable[[], Any],
    ) -> None:
        self.program, self.net, self.optimizer = program, net, optimizer
        self.evaluate, self.synchronize, self.skipping = evaluate, synchronize, skipping
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2, enabled=program["scaler"])

    def step(self, step: int) -> None:
        """One step of training."""
        program, optimizer = self.program, self.optimizer

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            return self.evaluate(step, lambda loss: loss)

        if program["closure"]:
            optimizer.step(closure)
            return
        optimizer.zero_grad(set_to_none=program["set_to_none"])
        self.evaluate(step, self.scaler.scale)
        if not (program["clip"] or program["scaler"]):
            optimizer.step()
            return
        self.synchronize()
        self.scaler.unscale_(optimizer)
        if program["clip"]:
            # Gradients of other parameters are local, so that each rank would clip by a norm of its own.
            torch.nn.utils.clip_grad_norm_(optimized(self.net, program), 0.2)
        with self.skipping():
            self.scaler.step(optimizer)
        self.scaler.update()


def on_ranks(program: Fields, rank: int, size: int, process_set: Any) -> Fields:
    """Trains on this rank."""
    import ronde.torch as hvd

    net = build(program, rank)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    optimizer = _distributed(program, net, optimizer_of(net, program), process_set)
    if program["optimizer"] != "LBFGS":
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    loop = _loop_on_rank(program, net, optimizer, rank)
    for step in range(program["steps"]):
        loop.step(step)
        if step == 1 and program["round_trip"] != "none":
            optimizer = _restored(program, net, loop.optimizer, rank, process_set)
            scaler, loop = loop.scaler, _loop_on_rank(program, net, optimizer, rank)
            loop.scaler = scaler
    return report(net, loop.optimizer)


def _loop_on_rank(program: Fields, net: Net, optimizer: Any, rank: int) -> Loop:
    def evaluate(step: int, scale: Any) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for each in range(program["passes"]):
            loss = net(rank, step * program["passes"] + each)
            scale(loss).backward()
            total = total + loss.detach()
        return total

    return Loop(program, net, optimizer, evaluate, optimizer.synchronize, optimizer.skip_synchronize)


def _distributed(program: Fields, net: Net, optimizer: Any, process_set: Any) -> Any:
    import ronde.torch as hvd

    groups: Any = program["groups"]
    if groups == "lists":
        groups = [[net.first.weight, net.twice.weight, net.frozen], [net.last.weight]]
    return hvd.DistributedOptimizer(
        optimizer,
        named_parameters=net.named_parameters(),
        compression=getattr(hvd.Compression, program["compression"]),
        backward_passes_per_step=program["passes"],
        op=getattr(hvd, program["op"]),
        gradient_predivide_factor=program["predivide"],
        groups=groups,
        sparse_as_dense=program["sparse_as_dense"],
        process_set=process_set,
    )


def _restored(program: Fields, net: Net, optimizer: Any, rank: int, process_set: Any) -> Any:
    """An optimizer that goes on with the state of the one before: by its dict, or as rank 0 broadcasts it."""
    import ronde.torch as hvd

    saved = copy.deepcopy(optimizer.state_dict())
    again = optimizer_of(net, program)
    if program["round_trip"] == "state_dict":
        wrapped = _distributed(program, net, again, process_set)
        wrapped.load_state_dict(saved)
        return wrapped
    if rank == 0:
        again.load_state_dict(saved)
    else:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(1.0)
    wrapped = _distributed(program, net, again, process_set)
    hvd.broadcast_parameters(net.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(wrapped, root_rank=0)
    return wrapped


def in_one_process(program: Fields, ranks: int) -> list[Fields]:
    """What each rank should report: members of the process set train together, others each alone."""
    members = groups_of(ranks)[program["group"]]
    alone = {rank: _train_alone(program, [rank]) for rank in range(ranks) if rank not in members}
    together = _train_alone(program, members)
    return [alone.get(rank, together) for rank in range(ranks)]


def _train_alone(program: Fields, members: list[int]) -> Fields:
    net = build(program, 0)
    optimizer = optimizer_of(net, program)

    def evaluate(step: int, scale: Any) -> torch.Tensor:
        every: list[Gradients] = []
        total = torch.zeros((), dtype=torch.float64)
        for rank in members:
            net.zero_grad()
            for each in range(program["passes"]):
                loss = net(rank, step * program["passes"] + each)
                scale(loss).backward()
                total = total + loss.detach() / (len(members) if program["op"] == "Average" else 1)
            every.append([parameter.grad for parameter in net.parameters()])
        owned = {id(parameter) for parameter in optimized(net, program)}
        for parameter, *column in zip(net.parameters(), *every):
            there = [gradient for gradient in column if gradient is not None]
            factor = len(column) if program["op"] == "Average" else 1
            parameter.grad = sum(there[1:], there[0]) / factor if there else None
            if id(parameter) not in owned:
                parameter.grad = None
        return total

    loop = Loop(program, net, optimizer, evaluate, lambda: None, contextlib.nullcontext)
    for step in range(program["steps"]):
        loop.step(step)
        if step == 1 and program["round_trip"] != "none":
            again = optimizer_of(net, program)
            saved = copy.deepcopy(optimizer.state_dict())
            again.load_state_dict(saved)
            loop.optimizer = optimizer = again
    return report(net, optimizer)
