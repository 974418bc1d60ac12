"""Draws programs of `ronde.torch`."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from differential.c10d_programs import Draws
from differential.c10d_worker import groups_of
from differential.torch_training import OPTIMIZERS, SPARSE

Fields = dict[str, Any]

CALLS = (
    "allreduce",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "grouped_allreduce",
    "grouped_allgather",
    "grouped_reducescatter",
)
FLOATS = ["float64", "float64", "float32"]
DTYPES = ["float32", "int64", "float16", "bfloat16", "int32", "int16", "uint8", "int8", "bool", "float64"]
LINEAR = ["Average", "Sum"]


@st.composite
def collectives(draw: st.DrawFn, size: int, orders: int | None = None, call: str | None = None) -> Fields:
    """A collective with results, first gradients and second gradients (orders 0, 1 and 2)."""
    group = draw(st.integers(0, len(groups_of(size)) - 1))
    draws = Draws(draw, groups_of(size)[group])
    fields: Fields = {
        "seed": draw(st.integers(0, 9_999)),
        "group": group,
        "kind": "torch",
        "call": call or draws.pick(CALLS),
        "orders": draws.pick([2, 2, 1, 0]) if orders is None else orders,
    }
    fields["before"] = "nothing" if fields["orders"] == 0 else draws.pick(["square", "sine", "nothing", "turned"])
    draws.dtype = draws.pick(FLOATS if fields["orders"] else DTYPES)
    draws.style = draws.pick(["real", "whole"])
    reduces = "reduce" in fields["call"]
    if reduces:
        _reduction(draws, fields)
    _tensors(draws, fields)
    if fields["call"] == "broadcast":
        fields["root"] = draws.root()
    if fields["call"].startswith("grouped"):
        fields["container"] = draws.pick(["list", "tuple", "generator"])
    if fields["orders"] == 0:
        in_place = fields["call"] in ("allreduce", "broadcast", "grouped_allreduce")
        fields["form"] = draws.pick(["sync", "async", *(["in_place", "async_in_place"] if in_place else [])])
    return fields


def _reduction(draws: Draws, fields: Fields) -> None:
    ops = LINEAR if fields["orders"] == 2 or "scatter" in fields["call"] else [*LINEAR, "Min", "Max", "Product"]
    if draws.dtype == "bool":
        ops = ["Sum", "Min", "Max", "Product"]
    fields["op"] = draws.pick(ops)
    is_real = draws.dtype in FLOATS
    fields["prescale"] = draws.pick([1.0, 1.0, 0.5, 3.0]) if is_real else 1.0
    fields["postscale"] = draws.pick([1.0, 1.0, 0.25, -2.0]) if is_real else 1.0


def _tensors(draws: Draws, fields: Fields) -> None:
    """The same shapes on all members, or other numbers of rows."""
    call, count = fields["call"], draws.pick([1, 2, 3]) if fields["call"].startswith("grouped") else 1
    rest = draws.pick([[], [2], [1, 3]])
    layout = draws.pick(["rows"] * 3 + ["turned", "strided", "offset", "part"])
    if call in ("allreduce", "broadcast", "grouped_allreduce"):
        shapes = [draws.pick([[3], [2, 2], [], [0], [1, 4], [5]]) for _ in range(count)]
        fields["tensors"] = [draws.spec(shape, plain=True, layout=layout) for shape in shapes]
    elif "reducescatter" in call:
        rows = st.integers(0, 2 * draws.size + 1)
        shapes = [[draws.draw(rows), *rest] for _ in range(count)]
        fields["tensors"] = [draws.spec(shape, plain=True, layout=layout) for shape in shapes]
    else:
        fields["by_rank"] = draws.by_rank(_ragged(draws, call, count, rest, layout))


def _ragged(draws: Draws, call: str, count: int, rest: list[int], layout: str) -> list[Fields]:
    """Tensors of each member. Those of an alltoall without splits have rows for all, as many for each."""
    own: list[Fields] = []
    with_splits = call == "alltoall" and draws.pick([True, False])
    for _ in draws.members:
        rows = [draws.draw(st.integers(0, 3)) for _ in range(count)]
        each: Fields = {}
        if with_splits:
            each["splits"] = [draws.draw(st.integers(0, 3)) for _ in draws.members]
            rows = [sum(each["splits"]) + draws.pick([0, 0, 1])]
        elif call == "alltoall":
            rows = [draws.size * rows[0]]
        each["tensors"] = [draws.spec([number, *rest], plain=True, layout=layout) for number in rows]
        own.append(each)
    return own


@st.composite
def norms(draw: st.DrawFn, size: int) -> Fields:
    """A SyncBatchNorm over rows that differ in number."""
    draws = Draws(draw, list(range(size)))
    draws.dtype, draws.style = "float64", "real"
    rest = draws.pick([[], [2], [2, 2]])
    channels = draws.pick([2, 3])
    rows = [draws.pick([2, 3, 1, 4]) for _ in draws.members]
    own: list[Fields] = [{"tensors": [draws.spec([each, channels, *rest], plain=True)]} for each in rows]
    return {
        "kind": "torch",
        "call": "batch_norm",
        "seed": draw(st.integers(0, 9_999)),
        "group": 0,
        "orders": draws.pick([2, 1]),
        "before": draws.pick(["nothing", "sine"]),
        "by_rank": draws.by_rank(own),
        "momentum": draws.pick([0.1, None, 1.0]),
        "affine": draws.pick([True, False]),
        "track": draws.pick([True, False]),
        "training": draws.pick([True, True, False]),
        "twice": draws.pick([False, True]),
    }


@st.composite
def gradchecks(draw: st.DrawFn, size: int, call: str | None = None) -> Fields:
    """A collective whose derivatives are checked by differences."""
    fields = draw(collectives(size, 2, call))
    fields["before"], fields["kind"] = "nothing", "gradcheck"
    least = size if fields["call"] == "grouped_reducescatter" else 0  # so that each rank gets rows
    for own in [fields, *fields.get("by_rank", {}).values()]:
        # Time grows with the square of the number of elements.
        own.get("tensors", [])[2:] = []
        for spec in own.get("tensors", []):
            shape = [max(least, rows) for rows in spec["shape"][:1]]
            spec.update(dtype="float64", style="real", shape=shape)
    return fields


@st.composite
def trainings(draw: st.DrawFn, size: int, optimizer: str | None = None) -> Fields:
    """Some steps of training by DistributedOptimizer."""
    draws = Draws(draw, list(range(size)))
    name = optimizer or draws.pick(OPTIMIZERS)
    rarely = [False, False, True]
    group = draws.pick([0, 0, len(groups_of(size)) - 1, 2 if size > 2 else 0])
    op = draws.pick(["Average", "Average", "Sum"])
    closure = name == "LBFGS" or draws.pick([False] * 4 + [True])
    fields = {
        "kind": "training",
        "seed": draw(st.integers(0, 999)),
        "group": group,
        "optimizer": name,
        "op": op,
        "predivide": draws.pick([1.0, 1.0, 2.0]) if op == "Average" else 1.0,
        "compression": draws.pick(["none"] * 4 + ["fp16"]) if name in ("SGD", "Adam") else "none",
        "passes": draws.pick([1, 1, 2]),
        "groups": draws.pick([None, None, 0, 2, "lists"]),
        "sparse": name == "SparseAdam" or (name in SPARSE and draws.pick(rarely)),
        "sparse_as_dense": draws.pick(rarely),
        "frozen": draws.pick(rarely),
        "unused": draws.pick(["never", "never", "some", "all"]),
        "two_groups": name != "LBFGS" and draws.pick(rarely),
        "closure": closure,
        "clip": not closure and draws.pick(rarely),
        "scaler": not closure and name != "SparseAdam" and draws.pick(rarely),
        "set_to_none": draws.pick([True, True, False]),
        "round_trip": "none",
        "steps": 4,
    }
    if name != "LBFGS" and group == 0:
        fields["round_trip"] = draws.pick(["none", "state_dict", "broadcast"])
    if fields["sparse"]:  # clipping and scaling are for dense gradients
        fields["clip"] = fields["scaler"] = False
    return fields


def everything(size: int) -> st.SearchStrategy[Fields]:
    """Programs of all kinds."""
    kinds = [collectives(size)] * 6 + [norms(size)] * 2 + [gradchecks(size)] + [trainings(size)] * 5
    return st.sampled_from(range(len(kinds))).flatmap(lambda place: kinds[place])
