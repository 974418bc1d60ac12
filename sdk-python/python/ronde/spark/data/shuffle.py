"""Shuffling and batching of blocks of columns, in bounded memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ronde.spark.data import columns as arrays

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BUFFER_BYTES = 256 * 2**20
"""The default size of a shuffling buffer."""


def shuffled(blocks: Iterable[arrays.Block], capacity: int | None, generator: Any) -> Iterator[arrays.Block]:
    """Returns the rows of blocks in a random order, in other blocks.

    capacity  -- how many rows are mixed: of so many, one half is returned and the other one is mixed with further
                 rows; None: as many as 256 MiB hold. A block may exceed it
    generator -- a `numpy.random.Generator`
    """
    waiting: list[arrays.Block] = []
    rows = 0
    for block in blocks:
        if capacity is None and arrays.rows_of(block):
            capacity = max(1, BUFFER_BYTES * arrays.rows_of(block) // max(1, bytes_of(block)))
        waiting.append(block)
        rows += arrays.rows_of(block)
        if capacity is not None and rows >= capacity:
            mixed = arrays.taken(arrays.joined(waiting), generator.permutation(rows))
            kept = capacity // 2
            yield arrays.cut(mixed, 0, rows - kept)
            waiting, rows = [arrays.cut(mixed, rows - kept, rows)], kept
    if rows:
        yield arrays.taken(arrays.joined(waiting), generator.permutation(rows))


def bytes_of(block: arrays.Block) -> int:
    """Returns the size of a block's arrays."""
    return sum(array.nbytes for array in block.values())


def batched(blocks: Iterable[arrays.Block], sizes: Iterable[int]) -> Iterator[arrays.Block]:
    """Returns batches of the given sizes, from the rows of blocks in their order.

    Raises ValueError if there are fewer rows than the sizes need.
    """
    source = iter(blocks)
    waiting: list[arrays.Block] = []
    rows = 0
    for size in sizes:
        while rows < size:
            block = next(source, None)
            if block is None:
                raise ValueError(f"the data set ended with {rows} of {size} rows of a batch; did its files change?")
            waiting.append(block)
            rows += arrays.rows_of(block)
        # Most batches are within one block, and a view of it.
        whole = arrays.joined(waiting)
        yield arrays.cut(whole, 0, size)
        waiting, rows = [arrays.cut(whole, size, rows)], rows - size
