"""Draws programs of `torch.distributed`."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from differential.c10d_worker import groups_of
from differential.tensors import LAYOUTS

Fields = dict[str, Any]

FLOATS = ["float32", "float64", "bfloat16", "float16"]
DTYPES = [*FLOATS, "int64", "int32", "uint8", "int8", "bool", "complex64", "complex128", "int16", "float8_e4m3fn"]
COMMON = ["float32"] * 6 + ["int64"] * 2 + ["float64", "bfloat16", "float16", "int32", "uint8", "int8", "bool"]
SHAPES = [(3,), (2, 3), (1,), (), (0,), (4,), (0, 2), (2, 0), (3, 1, 2), (5, 2)]
# Results of 64 KiB and more stay in shared memory.
LARGE = (17_003,)
OPS = ["SUM"] * 4 + ["MAX", "MIN", "PRODUCT"]
BITS = ["BAND", "BOR", "BXOR"]
MODES = ["sync"] * 4 + ["wait"] * 3 + ["late"] * 3 + ["never"] * 2
STYLES = ["whole"] * 4 + ["real"] * 2 + ["special", "full"]
# More operations than there are names for operations in flight.
BURST = 24
# After which a group gives up an operation that only some ranks perform.
SHORT_TIMEOUT_S = 3.0


@st.composite
def programs(draw: st.DrawFn, size: int, wrong: str = "") -> Fields:
    """A program for a job of `size` ranks.

    wrong -- "all" for one whose last step should raise on all ranks, "some" for one in which a rank disagrees with the
             others
    """
    seed = draw(st.integers(0, 9_999))
    form = draw(st.sampled_from(["steps"] * 8 + ["burst", "tangle"]))
    if form == "tangle" and size > 2 and not wrong:
        return {"kind": "c10d", "seed": seed, **draw(tangles(size))}
    groups = groups_of(size)
    group = draw(st.sampled_from([n for n, ranks in enumerate(groups) if len(ranks) > 1 or wrong != "some"]))
    members = groups[group]
    program = {"kind": "c10d", "seed": seed, "group": group, "order": draw(st.sampled_from(["fifo", "lifo"]))}
    if form == "burst" and not wrong:
        step = draw(steps(members))
        if step.get("mode", "sync") != "sync":
            step["mode"] = "late"
        return {**program, "steps": [step] * BURST}
    if wrong == "some":
        return {**program, "wrong": wrong, "timeout_s": SHORT_TIMEOUT_S, "steps": [draw(disagreements(members))]}
    if wrong:
        return {**program, "wrong": wrong, "steps": [draw(wrong_steps(members, size))]}
    return {**program, "steps": draw(st.lists(steps(members), min_size=1, max_size=4))}


@st.composite
def tangles(draw: st.DrawFn, size: int) -> Fields:
    """Operations of several groups, which each rank starts in a different order."""
    numbers = list(range(1, len(groups_of(size))))
    performed = []
    for number in numbers:
        # What Gloo refuses on some ranks would keep the others waiting.
        calls = ["all_reduce", "all_gather", "broadcast", "all_to_all_single"]
        step = _plain(draw(steps(groups_of(size)[number], calls)))
        performed.append({**step, "mode": "late", "group": number})
    orders = {str(rank): draw(st.permutations(range(len(performed)))) for rank in range(size)}
    return {"group": 0, "order": draw(st.sampled_from(["fifo", "lifo"])), "orders": orders, "steps": performed}


def _plain(fields: Any) -> Any:
    """The same step on contiguous tensors of float32 that are added up."""
    if isinstance(fields, list):
        return [_plain(each) for each in fields]
    if not isinstance(fields, dict):
        return fields
    plain = {"dtype": "float32", "layout": "rows", "op": "SUM", "grad": False}
    return {key: plain[key] if key in plain else _plain(each) for key, each in fields.items()}


class Draws:
    """What steps are drawn from, for the members of a group."""

    def __init__(self, draw: st.DrawFn, members: list[int]) -> None:
        self.draw, self.members, self.size = draw, members, len(members)
        self.dtype = self.pick(COMMON * 4 + DTYPES)
        self.style = self.pick(STYLES)

    def pick(self, values: Any) -> Any:
        """One of these."""
        return self.draw(st.sampled_from(list(values)))

    def shape(self) -> list[int]:
        """A shape; the first ones are the likeliest, and the simplest for shrinking."""
        return list(self.pick([*SHAPES, LARGE]))

    def rows(self) -> list[int]:
        """A shape with rows."""
        return list(self.pick([shape for shape in SHAPES if shape]))

    def spec(self, shape: list[int], plain: bool = False, **changes: Any) -> Fields:
        """A tensor of this shape."""
        made: Fields = {"dtype": self.dtype, "shape": shape, "style": self.style}
        if not plain:
            made["layout"] = self.pick(["rows"] * 6 + [layout for layout in LAYOUTS if layout != "conj"])
        return {**made, **changes}

    def leaf(self, shape: list[int]) -> Fields:
        """A tensor that is written on all ranks, and may require a gradient. Where only some ranks write, Gloo refuses
        that on those, and the others wait."""
        made = self.spec(shape, grad=self.pick([False] * 7 + [True]))
        return {**made, "layout": "conj"} if self.dtype.startswith("complex") and self.pick([False, True]) else made

    def op(self) -> str:
        """A reduction that the type has; one that Gloo refuses is rare."""
        if self.dtype.startswith("complex"):
            ops = ["SUM", "AVG"]
        elif "float" in self.dtype:
            ops = [*OPS, "AVG"]
        else:
            ops = [*OPS, *BITS] * 4 + ["AVG"]
        op: str = self.pick(ops)
        return op

    def root(self) -> int:
        """A rank of the job in the group."""
        root: int = self.pick(self.members)
        return root

    def by_rank(self, fields: list[Fields]) -> dict[str, Fields]:
        """Fields that differ between members, in their order."""
        return {str(rank): each for rank, each in zip(self.members, fields)}

    def matrix(self) -> list[list[int]]:
        """How many rows each member sends to each."""
        counts = st.integers(0, 3)
        return [[self.draw(counts) for _ in self.members] for _ in self.members]


@st.composite
def steps(draw: st.DrawFn, members: list[int], calls: list[str] | None = None) -> Fields:
    """A step with arguments that fit together."""
    draws = Draws(draw, members)
    names = list(STEPS) + ["all_reduce"] * 4 + ["broadcast", "all_gather", "all_to_all_single", "messages"]
    name = draw(st.sampled_from(calls or names))
    made: Fields = STEPS[name](draws)
    fields = {"call": name, **made}
    if name not in SYNCHRONOUS:
        fields["mode"] = draw(st.sampled_from(MODES))
    return fields


def _reduction(draws: Draws) -> Fields:
    return {"tensor": draws.leaf(draws.shape()), "op": draws.op()}


def _sparse(draws: Draws) -> Fields:
    draws.dtype = draws.pick(["float32", "float64", "int64"])
    return {"tensor": draws.spec(draws.rows(), plain=True, style="whole"), "op": "SUM"}


def _coalesced(draws: Draws) -> Fields:
    return {"tensors": [draws.spec(draws.shape()) for _ in range(draws.pick([1, 2, 3]))], "op": draws.op()}


def _broadcast(draws: Draws) -> Fields:
    return {"tensor": draws.leaf(draws.shape()), "root": draws.root()}


def _reduce(draws: Draws) -> Fields:
    return {**_reduction(draws), "root": draws.root()}


def _all_gather(draws: Draws) -> Fields:
    shape = draws.shape()
    return {"tensor": draws.spec(shape), "outputs": [draws.spec(shape) for _ in draws.members]}


def _all_gather_into(draws: Draws) -> Fields:
    shape = draws.rows()
    output = draws.pick([[draws.size * shape[0], *shape[1:]]] * 4 + [[draws.size, *shape]])
    return {"tensor": draws.spec(shape), "output": draws.spec(output, layout="rows")}


def _all_gather_coalesced(draws: Draws) -> Fields:
    shapes = [draws.shape() for _ in range(draws.pick([1, 2]))]
    outputs = [draws.spec(shape) for _ in draws.members for shape in shapes]
    return {"tensors": [draws.spec(shape) for shape in shapes], "outputs": outputs}


def _gather(draws: Draws) -> Fields:
    shape, root = draws.shape(), draws.root()
    outputs = [draws.spec(shape) for _ in draws.members]
    return {
        "tensor": draws.spec(shape),
        "root": root,
        "outputs": None,
        "by_rank": {str(root): {"outputs": outputs}},
    }


def _scatter(draws: Draws) -> Fields:
    shape, root = draws.shape(), draws.root()
    inputs = [draws.spec(shape) for _ in draws.members]
    return {"output": draws.spec(shape), "root": root, "tensors": None, "by_rank": {str(root): {"tensors": inputs}}}


def _reduce_scatter(draws: Draws) -> Fields:
    op = draws.op()
    shapes = [draws.shape()] * draws.size
    if draws.pick([False] * 6 + [True]):
        shapes = [draws.shape() for _ in draws.members]
    outputs = [{"output": draws.spec(shape)} for shape in shapes]
    return {"tensors": [draws.spec(shape) for shape in shapes], "op": op, "by_rank": draws.by_rank(outputs)}


def _reduce_scatter_tensor(draws: Draws) -> Fields:
    shape = draws.rows()
    whole = draws.pick([[draws.size * shape[0], *shape[1:]]] * 4 + [[draws.size, *shape]])
    tensor = draws.spec(whole, layout="rows")
    return {"tensor": tensor, "output": draws.spec(shape, layout="rows"), "op": draws.op()}


def _all_to_all(draws: Draws) -> Fields:
    rest = draws.pick([[], [2], [1, 2]])
    counts = draws.matrix()
    if draws.pick([True] * 5 + [False]):
        counts = [[draws.pick([2, 1, 0])] * draws.size] * draws.size
    fields = []
    for here in range(draws.size):
        sent = [draws.spec([each, *rest]) for each in counts[here]]
        received = [draws.spec([row[here], *rest]) for row in counts]
        fields.append({"tensors": sent, "outputs": received})
    return {"by_rank": draws.by_rank(fields)}


def _all_to_all_single(draws: Draws) -> Fields:
    rest = draws.pick([[], [2], [1, 2], [0]])
    if draws.pick([True, False]):
        rows = draws.size * draws.pick([1, 2, 0])
        return {
            "tensor": draws.spec([rows, *rest], layout="rows"),
            "output": draws.spec([rows, *rest], layout="rows"),
        }
    counts = draws.matrix()
    fields = []
    for here in range(draws.size):
        received = [row[here] for row in counts]
        fields.append(
            {
                "tensor": draws.spec([sum(counts[here]), *rest], layout="rows"),
                "output": draws.spec([sum(received), *rest], layout="rows"),
                "input_splits": counts[here],
                "output_splits": received,
            }
        )
    return {"by_rank": draws.by_rank(fields)}


def _nothing(draws: Draws) -> Fields:
    return {}


def _objects(draws: Draws) -> Fields:
    form = draws.pick(["all_gather", "gather", "broadcast", "scatter"])
    tensor = draws.spec([2], plain=True)
    lengths = [{"length": draws.pick([0, 3, 40, 2_000])} for _ in draws.members]
    return {"form": form, "tensor": tensor, "root": draws.root(), "by_rank": draws.by_rank(lengths)}


def _messages(draws: Draws) -> Fields:
    """Messages in one order everywhere, so that also one by one nobody waits for a message that comes later."""
    if draws.size == 1:
        return {"form": "alone", "messages": [], "order": "fifo"}
    form = draws.pick(["alone", "flight", "batch"])
    sent = []
    for number in range(draws.pick([1, 2, 3])):
        source, target = draws.draw(st.permutations(draws.members))[:2]
        message = {"src": source, "dst": target, "tag": draws.pick([0, number + 1])}
        message["tensor"] = draws.spec(draws.shape())
        sent.append(message)
    if form == "alone" and len(sent) == 1:
        sent[0]["any"] = draws.pick([True, False])
    return {"form": form, "messages": sent, "order": draws.pick(["fifo", "lifo"])}


def _functional(draws: Draws) -> Fields:
    form = draws.pick(
        ["all_reduce", "all_gather_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all", "all_reduce_coalesced"]
    )
    if form == "all_to_all":
        fields = _all_to_all_single(draws)
        return {"form": form, **fields}
    dim = draws.pick([0, 1])
    shape = draws.pick([[2, 3], [3, 1, 2], [5, 2]])
    if form == "reduce_scatter_tensor":
        shape[dim] *= draws.size
    op = draws.pick(OPS)
    return {"form": form, "dim": dim, "tensor": draws.spec(shape, grad=False), "op": op, "root": draws.root()}


def _differentiable(draws: Draws) -> Fields:
    form = draws.pick(
        [
            "all_reduce",
            "all_gather",
            "all_gather_base",
            "broadcast",
            "reduce",
            "gather",
            "scatter",
            "reduce_scatter",
            "all_to_all",
            "all_to_all_single",
        ]
    )
    draws.dtype, draws.style = draws.pick(["float32", "float64"]), "real"
    shape = draws.pick([[3], [2, 3], [1]])
    leaf, plain = draws.spec(shape, grad=True), draws.spec(shape, plain=True)
    fields: Fields = {"form": form, "root": draws.root()}
    if form == "all_gather_base":
        fields.update(tensor=leaf, output=draws.spec([draws.size * shape[0], *shape[1:]], plain=True))
    elif form == "all_to_all_single":
        rows = [draws.size * shape[0], *shape[1:]]
        fields.update(tensor=draws.spec(rows, layout="rows", grad=True), output=draws.spec(rows, plain=True))
    elif form == "all_to_all":
        fields.update(tensors=[leaf] * draws.size, outputs=[plain] * draws.size)
    elif form in ("scatter", "reduce_scatter"):
        fields.update(tensors=[leaf] * draws.size, output=plain)
    else:
        fields["tensor"] = leaf
    return fields


STEPS: dict[str, Any] = {
    "all_reduce": _reduction,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather_into,
    "all_gather_coalesced": _all_gather_coalesced,
    "gather": _gather,
    "scatter": _scatter,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "barrier": _nothing,
    "monitored_barrier": _nothing,
    "messages": _messages,
    "objects": _objects,
    "all_reduce_coalesced": _coalesced,
    "sparse_all_reduce": _sparse,
    "functional_call": _functional,
    "differentiable_call": _differentiable,
}
SYNCHRONOUS = {"monitored_barrier", "messages", "objects", "functional_call", "differentiable_call"}


@st.composite
def wrong_steps(draw: st.DrawFn, members: list[int], size: int) -> Fields:
    """A step whose arguments are wrong on all ranks."""
    name = draw(st.sampled_from(list(WRONG)))
    draws = Draws(draw, members)
    draws.dtype = draws.pick(["float32", "int64"])
    fields: Fields = {"call": name, **STEPS[name](draws), "mode": draws.pick(["sync", "wait"])}
    fault = draws.pick(WRONG[name])
    for each in [fields, *fields.get("by_rank", {}).values()]:
        _spoil(each, fault, size)
    fields["fault"] = fault
    return fields


WRONG = {
    "all_reduce": ["tensor is none", "bits of floats"],
    "broadcast": ["root outside", "root negative"],
    "reduce": ["root outside"],
    "all_gather": ["too few", "too many", "larger outputs", "other outputs", "one larger output"],
    "all_gather_into_tensor": ["larger output", "other output", "strided output"],
    "reduce_scatter": ["too few", "too many", "larger output", "other output"],
    "reduce_scatter_tensor": ["larger output", "other output", "strided output"],
    "all_to_all": ["too few", "larger outputs", "other outputs"],
    "all_to_all_single": ["larger output", "other output", "splits", "too few splits", "strided output"],
    "all_gather_coalesced": ["too few", "other outputs"],
}


def _spoil(fields: Fields, fault: str, size: int) -> None:
    """Makes arguments wrong, where these fields have them."""
    output, outputs = fields.get("output"), fields.get("outputs")
    which = "tensors" if fault.startswith("too") and outputs is None else "outputs"
    if fault == "tensor is none" and "tensor" in fields:
        fields["tensor"] = None
    elif fault == "bits of floats":
        fields.update(op="BAND", tensor={**fields["tensor"], "dtype": "float32"})
    elif fault.startswith("root") and "root" in fields:
        fields["root"] = size if fault == "root outside" else -1
    elif fault == "too few" and fields.get(which):
        fields[which] = fields[which][:-1]
    elif fault == "too many" and fields.get(which):
        fields[which] = [*fields[which], fields[which][0]]
    elif fault == "one larger output" and outputs:
        outputs[-1] = {**outputs[-1], "shape": [*outputs[-1]["shape"], 2]}
    elif fault.startswith("larger"):
        _change(fields, lambda spec: {**spec, "shape": [3, *spec["shape"]], "layout": "rows"})
    elif fault.startswith("other"):
        _change(fields, lambda spec: {**spec, "dtype": "int32"})
    elif fault == "strided output" and output is not None:
        fields["output"] = {**output, "layout": "strided"}
    elif fault == "splits" and fields.get("input_splits"):
        fields["input_splits"] = [each + 1 for each in fields["input_splits"]]
    elif fault == "too few splits" and fields.get("input_splits"):
        fields["input_splits"] = fields["input_splits"][:-1]


def _change(fields: Fields, change: Any) -> None:
    if fields.get("output") is not None:
        fields["output"] = change(fields["output"])
    if fields.get("outputs"):
        fields["outputs"] = [change(spec) for spec in fields["outputs"]]


@st.composite
def disagreements(draw: st.DrawFn, members: list[int]) -> Fields:
    """A step in which one rank's arguments do not fit those of the others."""
    draws = Draws(draw, members)
    draws.dtype = "float32"
    name = draws.pick(
        ["all_reduce", "broadcast", "all_gather", "all_to_all_single", "scatter", "reduce_scatter_tensor"]
    )
    fields: Fields = {"call": name, **STEPS[name](draws), "mode": draws.pick(["sync", "wait"])}
    culprit = str(draws.root())
    own = fields.setdefault("by_rank", {}).setdefault(culprit, {})
    seen = {**fields, **own}
    fault = draws.pick(["shape", "dtype"])
    for key in ("tensor", "output", "outputs", "tensors"):
        if seen.get(key):
            specs = seen[key] if isinstance(seen[key], list) else [seen[key]]
            changed = [_other(spec, fault) for spec in specs]
            own[key] = changed if isinstance(seen[key], list) else changed[0]
    if "input_splits" in own:
        own["input_splits"] = [2 * each + 1 for each in own["input_splits"]]
        own["output_splits"] = [2 * each + 1 for each in own["output_splits"]]
        for key, splits in (("tensor", "input_splits"), ("output", "output_splits")):
            own[key] = {**seen[key], "shape": [sum(own[splits]), *seen[key]["shape"][1:]]}
    return {**fields, "fault": f"one rank has another {fault}"}


def _other(spec: Fields, fault: str) -> Fields:
    if fault == "dtype":
        return {**spec, "dtype": "float64"}
    shape = spec["shape"]
    return {**spec, "shape": [2 * shape[0] + 2, *shape[1:]] if shape else [2]}
