"""Reads the rows of one rank from a Parquet data set, row group by row group."""

from __future__ import annotations

import collections
import contextlib
import itertools
import multiprocessing
import os
import threading
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pyarrow.dataset
import pyarrow.fs

from ronde.spark.data import columns as arrays
from ronde.spark.data.rows import Piece, RowGroup, pieces_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

POOLS = ("thread", "process", "dummy")
DEFAULT_WORKERS = 2


def row_groups(path: str, filesystem: Any = None) -> list[RowGroup]:
    """Returns the row groups of a Parquet data set, in the order of its files' names. Reads the files' footers.

    path       -- a folder or a file, as the filesystem knows it
    filesystem -- a `pyarrow.fs.FileSystem`; default: the local one

    Raises FileNotFoundError where there is nothing, and pyarrow.ArrowInvalid for files that are no Parquet.
    """
    found = pyarrow.dataset.dataset(path, filesystem=filesystem or pyarrow.fs.LocalFileSystem(), format="parquet")
    fragments = sorted(found.get_fragments(), key=lambda fragment: str(fragment.path))
    return [RowGroup(part.path, group.id, group.num_rows) for part in fragments for group in part.row_groups]


def schema_of(path: str, filesystem: Any = None) -> Any:
    """Returns the `pyarrow.Schema` of a Parquet data set. Raises what `row_groups` does."""
    return pyarrow.dataset.dataset(path, filesystem=filesystem or pyarrow.fs.LocalFileSystem(), format="parquet").schema


def check_columns(schema: Any, columns: Iterable[str], path: str) -> None:
    """Raises ValueError with the names of columns that a data set lacks."""
    if missing := [name for name in columns if name not in schema.names]:
        raise ValueError(
            f"the data set {path!r} has no column {', '.join(map(repr, missing))}; it has {', '.join(schema.names)}"
        )


class ShardReader:
    """The rows of rank `rank` of `size` ranks: see `ronde.spark.data.rows`.

    path       -- a Parquet data set: a folder or a file
    columns    -- the names of the columns to read; default: all
    filesystem -- a `pyarrow.fs.FileSystem`; default: the local one
    workers    -- how many row groups are read at the same time, and how many more are ready; default: 2
    pool       -- "thread"; "process", which decodes in separate processes; "dummy": in the thread that iterates
    start_method -- of processes: "spawn" (default), "forkserver" or "fork"

    It holds 2 * `workers` decoded row groups at most. Raises ValueError for columns that the data set lacks, and for
    another pool.
    """

    def __init__(
        self,
        path: str,
        rank: int = 0,
        size: int = 1,
        columns: Sequence[str] | None = None,
        filesystem: Any = None,
        workers: int | None = None,
        pool: str | None = "thread",
        start_method: str | None = None,
    ) -> None:
        if pool not in (None, *POOLS):
            raise ValueError(f"reader_pool_type is {pool!r}; it is one of {', '.join(POOLS)}")
        if workers is not None and workers < 1:
            raise ValueError(f"the number of a reader's workers is {workers}; it is at least 1")
        schema = schema_of(path, filesystem)
        self.columns = list(schema.names if columns is None else columns)
        check_columns(schema, self.columns, path)
        groups = row_groups(path, filesystem)
        self.path, self.rank, self.size = path, rank, size
        self.total_rows = sum(group.rows for group in groups)
        self.pieces = pieces_of(rank, size, groups)
        self.rows = sum(piece.rows for piece in self.pieces)
        self._filesystem = filesystem or pyarrow.fs.LocalFileSystem()
        # Of all passes: processes take seconds to start.
        self._executor: Executor | None = None
        self._workers, self._pool, self._start_method = workers or DEFAULT_WORKERS, pool or "thread", start_method

    def blocks(self, order: Iterable[int] | None = None) -> Iterator[arrays.Block]:
        """Returns one pass: a block of columns for each piece, in an order of `pieces`.

        Raises ValueError for null and ragged columns, with their names and the file.
        """
        pieces = self.pieces if order is None else [self.pieces[index] for index in order]
        if self._pool == "dummy":
            for piece in pieces:
                yield read_piece(self._filesystem, piece, self.columns)
            return
        with contextlib.closing(self._ahead(iter(pieces))) as blocks:
            yield from blocks

    def _ahead(self, pieces: Iterator[Piece]) -> Generator[arrays.Block, None, None]:
        if self._executor is None:
            self._executor = self._new_executor()
        executor = self._executor
        waiting: collections.deque[Any] = collections.deque()
        try:
            while True:
                for piece in itertools.islice(pieces, 2 * self._workers - len(waiting)):
                    waiting.append(executor.submit(read_piece, self._filesystem, piece, self.columns))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """Ends the threads or processes. A further pass starts new ones."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None

    def _new_executor(self) -> Executor:
        if self._pool == "thread":
            return ThreadPoolExecutor(self._workers, thread_name_prefix="ronde-parquet")
        # Not "fork" by default: the process has threads, and a session that does not work after a fork.
        context = multiprocessing.get_context(self._start_method or "spawn")
        return ProcessPoolExecutor(self._workers, mp_context=context, initializer=end_with_parent)


def end_with_parent() -> None:
    """Lets this process end when the one that started it has: that may be killed, and this one would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "the initializer of a pool runs in its processes"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="ronde-parent", daemon=True).start()


def read_piece(filesystem: Any, piece: Piece, columns: Sequence[str]) -> arrays.Block:
    """Returns some rows of a row group as arrays. Raises ValueError for null and ragged columns, with the file."""
    fragment = pyarrow.dataset.ParquetFileFormat().make_fragment(
        piece.path, filesystem=filesystem, row_groups=[piece.number]
    )
    # The pool has the threads; more of Arrow's would contend with those of training.
    table = fragment.to_table(columns=list(columns), use_threads=False)
    try:
        return arrays.arrays_of(table.slice(piece.start, piece.rows))
    except ValueError as error:
        raise ValueError(f"{piece.path}, row group {piece.number}: {error}") from error
