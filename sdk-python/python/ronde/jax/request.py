"""What a collective is, apart from its tensors: all that its ranks agree on, and shapes that follow from it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

from ronde.ops import Average

# The name of operations in compiled programs to which the user has given none. Their order distinguishes them.
UNNAMED = "jax"


@dataclasses.dataclass(frozen=True)
class Request:
    """A collective. Hashable, as parameters of JAX's primitives are.

    kind       -- the native client's name of it
    set, ranks, place -- the process set's number, its ranks in the job, and this process's place among these
    splits     -- alltoall: the rows for each rank; None for equal numbers
    rows       -- the rows from each rank, for allgather and alltoall; None if they are like this rank's own
    site       -- the user's line, for reports of stalls
    """

    kind: str
    set: int
    ranks: tuple[int, ...]
    place: int
    op: int = Average
    prescale: float = 1.0
    postscale: float = 1.0
    codec: str = ""
    root: int = 0
    splits: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None
    name: str | None = None
    site: str = ""

    @property
    def is_scaled(self) -> bool:
        """Whether it multiplies."""
        return (self.prescale, self.postscale) != (1.0, 1.0)

    def changed(self, **changes: Any) -> Request:
        """Returns this request with other values of these fields."""
        return dataclasses.replace(self, **changes)

    def derived(self, ending: str, **changes: Any) -> Request:
        """Returns `changed` for another operation, whose name follows from this one's."""
        return self.changed(name=None if self.name is None else f"{self.name}.{ending}", **changes)

    def result_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the result for a tensor of this shape."""
        if self.kind == "allgather":
            total = sum(self.rows) if self.rows is not None else shape[0] * len(self.ranks)
            return (total, *shape[1:])
        if self.kind == "alltoall" and self.rows is not None:
            return (sum(self.rows), *shape[1:])
        if self.kind == "reducescatter":
            return (self.shares(shape[0])[self.place], *shape[1:])
        return shape

    def shares(self, rows: int) -> tuple[int, ...]:
        """Returns how many of so many rows each rank gets when they are divided."""
        each, more = divmod(rows, len(self.ranks))
        return tuple(each + (place < more) for place in range(len(self.ranks)))

    def own_rows(self) -> slice:
        """Returns where this rank's rows are in the result of an all-gather with `rows`."""
        assert self.rows is not None
        ends = list(itertools.accumulate(self.rows, initial=0))
        return slice(ends[self.place], ends[self.place + 1])
