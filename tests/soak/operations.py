"""Random operations of a job, and the expected result of each rank. All ranks draw the same."""

from __future__ import annotations

import dataclasses
import random
from typing import Any, Callable

import numpy
import ronde

DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8")
REDUCTIONS = {"Sum": ronde.Sum, "Average": ronde.Average, "Min": ronde.Min, "Max": ronde.Max}
KINDS = ("allreduce",) * 6 + ("allgather", "broadcast", "reduce_scatter", "alltoall", "reduce", "gather", "scatter")
# Rows of a tensor; large ones are rare, as they take most of the time.
ROWS = (0, 1, 3, 17, 100, 1_000, 1_000, 20_000, 200_000)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation.

    ranks -- members of its process set, ascending
    rows  -- by member; alike where the kind wants that
    root  -- a place among the members
    """

    name: str
    kind: str
    ranks: tuple[int, ...]
    dtype: str
    op: str
    rows: tuple[int, ...]
    columns: int
    root: int
    seed: int

    def contribution(self, place: int) -> numpy.ndarray:
        """A member's contribution: small whole numbers, so that sums are exact in every type."""
        generator = numpy.random.default_rng([self.seed, place])
        return generator.integers(0, 4, (self.rows[place], self.columns)).astype(self.dtype)


def draw(rng: random.Random, name: str, sets: list[tuple[int, ...]]) -> Operation:
    """The next operation."""
    ranks, kind = rng.choice(sets), rng.choice(KINDS)
    is_ragged = kind in ("allgather", "gather")
    rows = [rng.choice(ROWS[:-2] if is_ragged else ROWS) for _ in ranks]
    if kind in ("alltoall", "scatter"):
        rows = [each // len(ranks) * len(ranks) for each in rows]
    return Operation(
        name=name,
        kind=kind,
        ranks=ranks,
        dtype=rng.choice(DTYPES),
        op=rng.choice(list(REDUCTIONS)),
        rows=tuple(rows) if is_ragged else (rows[0],) * len(ranks),
        columns=rng.choice((1, 1, 3)),
        root=rng.randrange(len(ranks)),
        seed=rng.getrandbits(32),
    )


def submit(client: ronde.Client, operation: Operation, process_set: Any, me: int) -> Callable[[], Any]:
    """Submits this rank's part; returns a function that waits for its result."""
    mine, root = operation.contribution(operation.ranks.index(me)), operation.ranks[operation.root]
    options = {"name": operation.name, "process_set": process_set}
    reduction = REDUCTIONS[operation.op]
    if operation.kind == "allreduce":
        handle = client.allreduce_async(mine, reduction, **options)
    elif operation.kind == "reduce_scatter":
        handle = client.reduce_scatter_async(mine, reduction, **options)
    elif operation.kind == "reduce":
        handle = client.reduce_async(mine, root, reduction, **options)
    elif operation.kind in ("broadcast", "gather"):
        handle = getattr(client, f"{operation.kind}_async")(mine, root, **options)
    elif operation.kind == "scatter":
        handle = client.scatter_async(mine if me == root else None, root, **options)
    else:
        handle = getattr(client, f"{operation.kind}_async")(mine, **options)
    return handle.wait


def expected(operation: Operation, me: int) -> numpy.ndarray | None:
    """The expected result of this rank; None if it has none."""
    place, size = operation.ranks.index(me), len(operation.ranks)
    every = [operation.contribution(each) for each in range(size)]
    if operation.kind in ("reduce", "gather") and place != operation.root:
        return None
    if operation.kind in ("allreduce", "reduce", "reduce_scatter"):
        whole = _reduced(operation, every)
        return _rows_of(whole, place, size) if operation.kind == "reduce_scatter" else whole
    if operation.kind == "broadcast":
        return every[operation.root]
    if operation.kind == "scatter":
        return _rows_of(every[operation.root], place, size)
    if operation.kind == "alltoall":
        return numpy.concatenate([_rows_of(each, place, size) for each in every])
    return numpy.concatenate(every)


def wrong_elements(got: Any, wanted: numpy.ndarray | None) -> int:
    """The number of wrong elements; with a wrong shape or type all, and at least one."""
    if wanted is None or got is None:
        return 0 if got is None and wanted is None else 1
    if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
        return max(1, wanted.size)
    if wanted.dtype.kind == "f":
        # Of averages, whose last bit depends on the order of division.
        return int((~numpy.isclose(got.astype(numpy.float64), wanted.astype(numpy.float64), 2e-3, 1e-6)).sum())
    return int((got != wanted).sum())


def _reduced(operation: Operation, every: list[numpy.ndarray]) -> numpy.ndarray:
    stacked = numpy.stack(every)
    if operation.op in ("Min", "Max"):
        extreme: numpy.ndarray = stacked.min(0) if operation.op == "Min" else stacked.max(0)
        return extreme
    whole = stacked.astype(numpy.float64 if stacked.dtype.kind == "f" else numpy.int64).sum(0)
    if operation.op == "Average":
        whole = whole / len(every) if stacked.dtype.kind == "f" else whole // len(every)
    reduced: numpy.ndarray = whole.astype(stacked.dtype)
    return reduced


def _rows_of(whole: numpy.ndarray, place: int, size: int) -> numpy.ndarray:
    """A member's rows; the first members have one more where they do not divide."""
    rows: numpy.ndarray = numpy.array_split(whole, size)[place]
    return rows
