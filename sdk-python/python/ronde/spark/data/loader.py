"""Loaders of batches from the rows of one rank."""

from __future__ import annotations

import inspect
import itertools
from typing import TYPE_CHECKING, Any, Callable

import numpy

from ronde.data import AsyncDataLoaderMixin, BaseDataLoader
from ronde.spark.data import columns as arrays
from ronde.spark.data.rows import batch_sizes, steps_of
from ronde.spark.data.shuffle import batched, shuffled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ronde.spark.data.reader import ShardReader

Transform = Callable[[arrays.Block], arrays.Block]


class ParquetDataLoader(BaseDataLoader):
    """Batches of a rank's rows: dictionaries of NumPy arrays by column, with `batch_size` rows each.

    reader     -- reads the rows
    batch_size -- rows of a batch
    steps      -- batches of one pass, the same on all ranks; default: as many as give each row once. With this number
                  the last batch of a pass has the remaining rows, `batch_size + 2` at most. With another number, passes
                  continue where the one before ended, and all batches are full
    shuffle    -- whether to shuffle row groups, and rows by a buffer of `buffer_rows` (default: 256 MiB)
    seed       -- the order of shuffling follows from it, the rank, and the number of the pass over the data
    first_pass -- the number of the first pass
    transform  -- is applied to each batch, after batching
    cache      -- whether to keep all rows of the rank in memory after the first pass

    Raises ValueError for a data set with fewer rows than ranks.
    """

    def __init__(
        self,
        reader: ShardReader,
        batch_size: int,
        steps: int | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        buffer_rows: int | None = None,
        first_pass: int = 0,
        transform: Transform | None = None,
        cache: bool = False,
    ) -> None:
        self._whole_pass = steps_of(reader.total_rows, reader.size, batch_size)
        self.steps = self._whole_pass if steps is None else steps
        self.reader, self.batch_size, self.shuffle = reader, batch_size, shuffle
        self._seed, self._buffer_rows, self._transform, self._cache = seed or 0, buffer_rows, transform, cache
        self._cached: arrays.Block | None = None
        self._batches = self._endless(first_pass)

    def __len__(self) -> int:
        return self.steps

    def _iterate(self) -> Iterator[arrays.Block]:
        for batch in itertools.islice(self._batches, self.steps):
            if self._cache and not self.shuffle:
                # A view of the cache, which must be the same in the next pass, whatever the program does to batches.
                batch = {name: array.copy() for name, array in batch.items()}  # noqa: PLW2901
            yield batch if self._transform is None else self._transform(batch)

    def _endless(self, first_pass: int) -> Iterator[arrays.Block]:
        """Batches of pass after pass."""
        if self.steps == self._whole_pass:
            sizes = batch_sizes(self.reader.rows, self.steps, self.batch_size)
            for number in itertools.count(first_pass):
                yield from batched(self._pass(number), sizes)
        passes = itertools.chain.from_iterable(map(self._pass, itertools.count(first_pass)))
        yield from batched(passes, itertools.repeat(self.batch_size))

    def _pass(self, number: int) -> Iterator[arrays.Block]:
        """The rows of one pass, as blocks."""
        generator = numpy.random.default_rng([self._seed, self.reader.rank, number])
        if self._cache:
            if self._cached is None:
                self._cached = arrays.joined(list(self.reader.blocks()))
            order = generator.permutation(self.reader.rows)
            return iter([arrays.taken(self._cached, order) if self.shuffle else self._cached])
        if not self.shuffle:
            return self.reader.blocks()
        blocks = self.reader.blocks(generator.permutation(len(self.reader.pieces)).tolist())
        return shuffled(blocks, self._buffer_rows, generator)


class AsyncParquetDataLoader(AsyncDataLoaderMixin, ParquetDataLoader):
    """ParquetDataLoader whose batches a thread reads in advance: `async_loader_queue_size` batches, 64 by default."""


def transform_of(function: Any, edited: Any = None, removed: Any = None) -> Transform | None:
    """Returns what applies a program's `transformation_fn` to batches; None for None.

    function -- takes a batch as a `pandas.DataFrame`, whose lists and vectors are arrays in cells, and returns one; or
                takes nothing and returns such a function
    edited   -- names of columns (or tuples that begin with them) that it adds or changes; information only
    removed  -- names of columns that are left out after it

    Raises TypeError for something that cannot be called.
    """
    del edited
    if function is None:
        return None
    if not callable(function):
        raise TypeError(f"transformation_fn is {function!r}, which cannot be called")
    dropped = set(removed or [])
    apply: Any = None

    def transform(batch: arrays.Block) -> arrays.Block:
        nonlocal apply
        if apply is None:
            # In the process that trains: what it constructs need not be picklable.
            apply = function() if _takes_nothing(function) else function
        frame = apply(_frame(batch))
        return {str(name): _stacked(str(name), frame[name]) for name in frame if name not in dropped}

    return transform


def _takes_nothing(function: Any) -> bool:
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return not any(each.kind in kinds and each.default is inspect.Parameter.empty for each in parameters)


def _frame(batch: arrays.Block) -> Any:
    import pandas

    return pandas.DataFrame({name: array if array.ndim == 1 else list(array) for name, array in batch.items()})


def _stacked(name: str, column: Any) -> Any:
    """A column of a `pandas.DataFrame`, or of a dictionary, as an array."""
    array = column.to_numpy() if hasattr(column, "to_numpy") else numpy.asarray(column)
    if array.dtype != object:
        return array
    try:
        return numpy.stack([numpy.asarray(cell) for cell in array])
    except ValueError as error:
        raise ValueError(f"transformation_fn returns column {name!r} with rows of different shapes: {error}") from error
