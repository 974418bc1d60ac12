"""Models collectives of `torch.distributed`: runs all ranks of a program in one process, step by step."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch

from differential.c10d_worker import OVERWRITTEN, groups_of
from differential.tensors import make, packed

Fields = dict[str, Any]
Views = dict[str, torch.Tensor]

BITS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def expected(program: Fields, ranks: int) -> list[dict[str, dict[str, Any]]]:
    """Values and what they are after those that nobody waited for were overwritten, as a rank reports them.

    Omits what the model does not define: steps on objects, and unspecified contents.
    """
    reports: list[dict[str, dict[str, Any]]] = [{"values": {}, "after": {}} for _ in range(ranks)]
    for index, step in enumerate(program["steps"]):
        if step["call"] not in RULES:
            continue
        members = groups_of(ranks)[step.get("group", program["group"])]
        state = State(step, (program["seed"], index), members)
        RULES[step["call"]](state)
        for rank in members:
            named = {name: base for name, base in state.bases[rank].items() if name not in state.unspecified[rank]}
            reports[rank]["values"].update({f"{index}.{name}": packed(base) for name, base in named.items()})
            for base in named.values():
                if step.get("mode") == "never":
                    base.fill_(OVERWRITTEN)
            reports[rank]["after"].update({f"{index}.{name}": packed(base) for name, base in named.items()})
    return reports


class State:
    """The tensors of all members in one step, which have the same elements as in the ranks' processes."""

    def __init__(self, step: Fields, key: tuple[object, ...], members: list[int]) -> None:
        self.members, self.key = members, key
        self.fields = {rank: {**step, **step.get("by_rank", {}).get(str(rank), {})} for rank in members}
        self.bases: dict[int, Views] = {rank: {} for rank in members}
        self.unspecified: dict[int, set[str]] = {rank: set() for rank in members}
        self.op = step.get("op", "SUM")
        self.root: int = step.get("root", members[0])

    def one(self, rank: int, name: str = "tensor", spec: Fields | None = None) -> torch.Tensor:
        """A tensor of a rank; other calls for it give the same memory."""
        view, base = make({**(spec or self.fields[rank][name]), "grad": False}, *self.key, name, rank)
        self.bases[rank][name] = base
        return view

    def every(self, name: str = "tensor") -> list[torch.Tensor]:
        """A tensor of each member."""
        return [self.one(rank, name) for rank in self.members]

    def many(self, rank: int, name: str = "tensors") -> list[torch.Tensor]:
        """A list of a rank."""
        specs = self.fields[rank][name]
        return [self.one(rank, f"{name}.{index}", spec) for index, spec in enumerate(specs)]

    def lists(self, name: str = "tensors") -> list[list[torch.Tensor]]:
        """A list of each member."""
        return [self.many(rank, name) for rank in self.members]

    def reduced(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The reduction, in a precision that is wide enough, cast at the end."""
        dtype = tensors[0].dtype
        if self.op in BITS:
            return functools.reduce(BITS[self.op], tensors)
        if dtype == torch.bool:
            stacked = torch.stack(tensors)
            return stacked.any(0) if self.op in ("SUM", "MAX") else stacked.all(0)
        wide = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else torch.int64
        stacked = torch.stack([tensor.to(wide) for tensor in tensors])
        if self.op == "SUM":
            return stacked.sum(0).to(dtype)
        if self.op == "AVG":
            total = stacked.sum(0)
            mean = total / len(tensors) if wide != torch.int64 else total.div(len(tensors), rounding_mode="trunc")
            return mean.to(dtype)
        if self.op == "PRODUCT":
            return stacked.prod(0).to(dtype)
        return (stacked.amax(0) if self.op == "MAX" else stacked.amin(0)).to(dtype)


def _write(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source.reshape(target.shape))


def _all_reduce(state: State) -> None:
    tensors = state.every()
    result = state.reduced(tensors)
    for tensor in tensors:
        _write(tensor, result)


def _all_reduce_coalesced(state: State) -> None:
    for column in zip(*state.lists()):
        result = state.reduced(list(column))
        for tensor in column:
            _write(tensor, result)


def _broadcast(state: State) -> None:
    tensors = state.every()
    source = tensors[state.members.index(state.root)].clone()
    for tensor in tensors:
        _write(tensor, source)


def _reduce(state: State) -> None:
    """Elements on other ranks than the root are unspecified."""
    tensors = state.every()
    _write(tensors[state.members.index(state.root)], state.reduced(tensors))
    for rank in state.members:
        if rank != state.root:
            state.unspecified[rank].add("tensor")


def _all_gather(state: State) -> None:
    tensors = state.every()
    for outputs in state.lists("outputs"):
        for output, tensor in zip(outputs, tensors):
            _write(output, tensor)


def _all_gather_into_tensor(state: State) -> None:
    whole = torch.cat([tensor.reshape(-1) for tensor in state.every()])
    for output in state.every("output"):
        _write(output, whole)


def _all_gather_coalesced(state: State) -> None:
    lists = state.lists()
    flat = [tensor for tensors in lists for tensor in tensors]
    for outputs in state.lists("outputs"):
        for output, tensor in zip(outputs, flat):
            _write(output, tensor)


def _gather(state: State) -> None:
    tensors = state.every()
    for output, tensor in zip(state.many(state.root, "outputs"), tensors):
        _write(output, tensor)


def _scatter(state: State) -> None:
    parts = state.many(state.root)
    for output, part in zip(state.every("output"), parts):
        _write(output, part)


def _reduce_scatter(state: State) -> None:
    for output, column in zip(state.every("output"), zip(*state.lists())):
        _write(output, state.reduced(list(column)))


def _reduce_scatter_tensor(state: State) -> None:
    whole = state.reduced(state.every()).reshape(-1)
    for output, part in zip(state.every("output"), whole.chunk(len(state.members)) if whole.numel() else []):
        _write(output, part)


def _all_to_all(state: State) -> None:
    lists = state.lists()
    for here, outputs in enumerate(state.lists("outputs")):
        for output, tensors in zip(outputs, lists):
            _write(output, tensors[here])


def _all_to_all_single(state: State) -> None:
    parts = []
    for rank, tensor in zip(state.members, state.every()):
        splits = state.fields[rank].get("input_splits") or [tensor.shape[0] // len(state.members)] * len(state.members)
        parts.append(tensor.split(splits))
    for here, output in enumerate(state.every("output")):
        _write(output, torch.cat([mine[here] for mine in parts]))


def _messages(state: State) -> None:
    sent = state.fields[state.members[0]]["messages"]
    for number, message in enumerate(sent):
        views = {}
        for rank in (message["src"], message["dst"]):
            view, base = make({**message["tensor"], "grad": False}, *state.key, number, rank)
            views[rank], state.bases[rank][f"message.{number}"] = view, base
        _write(views[message["dst"]], views[message["src"]])


RULES: dict[str, Callable[[State], None]] = {
    "all_reduce": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "all_gather_coalesced": _all_gather_coalesced,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "messages": _messages,
}
