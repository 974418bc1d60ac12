"""Seeded inputs, and the check of every element of every result.

The input of a rank is drawn from NumPy's PCG64([seed, rank, iteration]): integers from 0 to 65,535 as float32, four
from each 64 bits of the generator. Every rank can draw every other's, so each checks its own result locally, block by
block, without memory for whole references.

The sum of up to 256 such numbers is below 2^24, so float32 represents it, and every partial sum, exactly. In whatever
order a backend adds, each element must equal the reference, as must elements that are only moved. Only a loop that
repeatedly reduces its own result leaves that range. Then n numbers added in float32, k times over, have an error of at
most g = k n u / (1 - k n u) of their sum, u = 2^-24.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from collections.abc import Iterator

    Array = numpy.ndarray[Any, Any]

BLOCK_ELEMENTS = 1 << 17
ELEMENTS_PER_DRAW = 4  # of 16 bits in 64
UNIT_ROUNDOFF = 2.0**-24
ROOT_RANK = 0  # of broadcasts
# The sum of float32 must stay below 2^128 while a loop repeatedly reduces its own result.
GROWTH_BITS_MAX = 100


@dataclasses.dataclass(frozen=True)
class Draw:
    """The inputs of all ranks in one iteration."""

    collective: str
    count: int
    ranks: int
    seed: int
    iteration: int

    def fill(self, out: Array, rank: int) -> None:
        """Draws a rank's input into `out`, which is float32."""
        bits = self._bits(rank)
        for start in range(0, len(out), BLOCK_ELEMENTS):
            _draw(bits, out[start : start + BLOCK_ELEMENTS])

    def parts(self, rank: int) -> Iterator[Array]:
        """Yields a rank's input, block by block. Each block is overwritten by the next."""
        bits = self._bits(rank)
        block = numpy.empty(min(self.count, BLOCK_ELEMENTS), numpy.float32)
        for start in range(0, self.count, BLOCK_ELEMENTS):
            part = block[: min(BLOCK_ELEMENTS, self.count - start)]
            _draw(bits, part)
            yield part

    def _bits(self, rank: int) -> numpy.random.PCG64:
        return numpy.random.PCG64([self.seed, rank, self.iteration])


@dataclasses.dataclass(frozen=True)
class Wrong:
    """The first wrong element of a result."""

    element: int
    got: float
    expected: float


def find_wrong(draw: Draw, rank: int, result: Array, repeats: int = 1) -> Wrong | None:
    """Returns the first wrong element of a rank's result, or None.

    repeats -- how often the all-reduce was performed, each time on its own result
    """
    if result.dtype != numpy.float32 or result.shape != (result_count(draw),):
        raise ValueError(f"a result is float32 of {result_count(draw)} elements, not {result.dtype} of {result.shape}")
    if draw.collective == "allreduce":
        return _find_in_sum(draw, 0, result, repeats)
    if draw.collective == "reduce_scatter":
        return _find_in_sum(draw, rank * len(result), result, repeats)
    return _find_in_moved(draw, rank, result)


def result_count(draw: Draw) -> int:
    """Returns the number of elements of a rank's result."""
    return draw.count // draw.ranks if draw.collective == "reduce_scatter" else draw.count


def repeats_max(ranks: int) -> int:
    """Returns how often a loop may reduce its own result before it must restart from the input."""
    return max(1, int(GROWTH_BITS_MAX / numpy.log2(max(2, ranks))))


def error_bound(ranks: int, repeats: int) -> float:
    """Returns the bound of the relative error of a repeated sum."""
    terms = ranks * repeats * UNIT_ROUNDOFF
    return terms / (1.0 - terms)


def _find_in_sum(draw: Draw, start: int, result: Array, repeats: int) -> Wrong | None:
    """Compares a run of the sum of all inputs, starting at element `start`."""
    bound = error_bound(draw.ranks, repeats)
    growth = numpy.float64(draw.ranks) ** (repeats - 1)
    offset = 0
    for blocks in zip(*(draw.parts(rank) for rank in range(draw.ranks))):
        first, last = max(start, offset), min(start + len(result), offset + len(blocks[0]))
        if first < last:
            inside = slice(first - offset, last - offset)
            expected = blocks[0][inside].copy()
            for block in blocks[1:]:
                expected += block[inside]
            got = result[first - start : last - start]
            bad = got != expected
            if repeats > 1:
                expected = expected * growth
                # NaN is not within the bound.
                bad = ~(numpy.abs(got - expected) <= bound * expected)
            if wrong := _first(bad, got, expected, first - start):
                return wrong
        offset += len(blocks[0])
    return None


def _find_in_moved(draw: Draw, rank: int, result: Array) -> Wrong | None:
    """Compares elements that were only moved and must have the same bits."""
    share = draw.count // draw.ranks
    if draw.collective == "broadcast":
        return _find_in_run(draw, ROOT_RANK, 0, result, 0)
    starts = {"allgather": 0, "alltoall": rank * share}
    for source in range(draw.ranks):
        part = result[source * share : (source + 1) * share]
        if wrong := _find_in_run(draw, source, starts[draw.collective], part, source * share):
            return wrong
    return None


def _find_in_run(draw: Draw, source: int, start: int, result: Array, place: int) -> Wrong | None:
    """Compares a run with the input of rank `source` from element `start`. `place` is its offset in the result."""
    offset = 0
    for block in draw.parts(source):
        first, last = max(start, offset), min(start + len(result), offset + len(block))
        if first < last:
            expected = block[first - offset : last - offset]
            got = result[first - start : last - start]
            if wrong := _first(got != expected, got, expected, place + first - start):
                return wrong
        offset += len(block)
        if offset >= start + len(result):
            break
    return None


def _draw(bits: numpy.random.PCG64, out: Array) -> None:
    """Draws the next elements. All blocks but the last have a multiple of `ELEMENTS_PER_DRAW` elements."""
    raw = bits.random_raw(-(-len(out) // ELEMENTS_PER_DRAW))
    numpy.copyto(out, raw.view(numpy.uint16)[: len(out)])


def _first(bad: Array, got: Array, expected: Array, place: int) -> Wrong | None:
    if not bad.any():
        return None
    index = int(bad.argmax())
    return Wrong(place + index, float(got[index]), float(expected[index]))
