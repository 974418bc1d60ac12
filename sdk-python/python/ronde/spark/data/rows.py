"""Which rows of a Parquet data set a rank reads, and how many batches that makes. Pure arithmetic.

The rows of all row groups, in the order of files and groups, are numbered from 0. Rank `r` of `n` reads the rows from
`r * rows // n` to before `(r + 1) * rows // n`, so ranks differ by at most one row. A row group at such a limit is read
by both ranks, and each keeps its part.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class RowGroup(NamedTuple):
    """A row group of a Parquet file.

    path, number -- the file, and the group's number in it
    rows         -- how many rows it has
    """

    path: str
    number: int
    rows: int


class Piece(NamedTuple):
    """Rows of a row group: from `start` to before `stop`, counted in the group."""

    path: str
    number: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """How many rows these are."""
        return self.stop - self.start


def pieces_of(rank: int, size: int, groups: Sequence[RowGroup]) -> list[Piece]:
    """Returns what a rank reads, in the order of the rows. Raises ValueError for a rank that is not below `size`."""
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not below the number of ranks, {size}")
    total = sum(group.rows for group in groups)
    begin, end = rank * total // size, (rank + 1) * total // size
    pieces, first = [], 0
    for group in groups:
        start, stop = max(begin - first, 0), min(end - first, group.rows)
        if start < stop:
            pieces.append(Piece(group.path, group.number, start, stop))
        first += group.rows
    return pieces


def steps_of(rows: int, size: int, batch_size: int) -> int:
    """Returns the number of batches of one pass, which is the same on all ranks.

    One row that is left over is not a separate batch, in which batch normalization would have no variance. The last
    batch has it then.

    rows       -- of the data set
    size       -- the number of ranks
    batch_size -- rows of a batch of one rank

    Raises ValueError if there are fewer rows than ranks: a rank would have none.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}; it is at least 1")
    if rows < size:
        raise ValueError(f"the data set has {rows} rows for {size} processes; each process needs at least one")
    full, rest = divmod(rows // size, batch_size)
    return full + (rest > 1 or full == 0)


def batch_sizes(rows: int, steps: int, batch_size: int) -> list[int]:
    """Returns the sizes of a rank's batches of one pass. The last one has the remaining rows.

    rows -- of this rank. Its last batch has `batch_size + 2` rows at most: one that is left over on all ranks, and one
            that this rank has more than others
    """
    full = [batch_size] * (steps - 1)
    return [*full, rows - sum(full)]
