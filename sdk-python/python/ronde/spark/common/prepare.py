"""Writes DataFrames to a store as Parquet, once for each DataFrame."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import pyspark.sql.functions as sql
from pyspark import StorageLevel

from ronde.spark.common import schema
from ronde.spark.data.reader import row_groups

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ronde.spark.common.store import Store

DEFAULT_PARTITIONS_PER_PROCESS = 10
_CHOSEN = "__ronde_chosen"
_EXISTS = "PATH_ALREADY_EXISTS"
ATTEMPTS = 5
"""How many numbers of data sets are tried when other programs write to the same store."""

ENTRIES_MAX = 32
"""How many DataFrames are kept to recognize them."""


class DataSet(NamedTuple):
    """What was written: the number of the data sets in the store, and their rows."""

    number: int | None
    train_rows: int
    val_rows: int


class _Entry(NamedTuple):
    df: Any
    key: tuple[Any, ...]
    written: DataSet


_entries: list[_Entry] = []
_lock = threading.Lock()
_prepared: weakref.WeakKeyDictionary[Any, list[int | None]] = weakref.WeakKeyDictionary()


def clear_training_cache() -> None:
    """Makes estimators write DataFrames again that they wrote before. The written files stay."""
    with _lock:
        _entries.clear()


@contextlib.contextmanager
def prepare_data(
    num_processes: int,
    store: Store,
    df: Any,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    validation: Any = None,
    sample_weight_col: str | None = None,
    compress_sparse: bool = False,
    partitions_per_process: int | None = DEFAULT_PARTITIONS_PER_PROCESS,
    verbose: int = 0,
    random_seed: int | None = None,
) -> Iterator[int | None]:
    """Writes a DataFrame for `fit_on_parquet`; a context, whose value is the number of the data sets in the store.

    num_processes   -- how many processes will train: the data has `partitions_per_process` files for each
    label_columns, feature_columns, sample_weight_col -- the columns that are written
    validation      -- a share of the rows, or a column that is true or above 0 in rows for validation
    compress_sparse -- whether vectors are written as indices and values
    verbose         -- above 0, prints where the data is
    random_seed     -- of the choice of a share

    Inside of the context `fit_on_parquet()` trains on these data; later it does by
    `fit_on_parquet(dataset_idx=NUMBER)`. The same DataFrame (the same object) with the same arguments is written once.
    Raises ValueError for missing, null and ragged columns, and for an empty DataFrame.
    """
    written = write(
        num_processes,
        store,
        df,
        list(label_columns),
        list(feature_columns),
        validation,
        sample_weight_col,
        compress_sparse,
        partitions_per_process,
        verbose,
        random_seed,
    )
    active = _prepared.setdefault(store, [])
    active.append(written.number)
    try:
        yield written.number
    finally:
        active.remove(written.number)


def prepared_index(store: Store) -> int | None:
    """Returns the number of the data sets of the innermost `prepare_data` context for a store, or None."""
    active = _prepared.get(store)
    return active[-1] if active else None


def write(
    num_processes: int,
    store: Store,
    df: Any,
    label_columns: list[str],
    feature_columns: list[str],
    validation: Any,
    sample_weight_col: str | None,
    compress_sparse: bool,
    partitions_per_process: int | None,
    verbose: int,
    random_seed: int | None,
) -> DataSet:
    """Writes a DataFrame unless that was done, and returns where. As `prepare_data`."""
    weights = [sample_weight_col] if sample_weight_col else []
    columns = list(dict.fromkeys([*feature_columns, *label_columns, *weights]))
    schema.check_present(df, columns, "the feature, label or weight column")
    schema.check_types(df, columns)
    schema.check_validation(validation, df)
    files = num_processes * (partitions_per_process or DEFAULT_PARTITIONS_PER_PROCESS)
    key = (store.get_full_path(store.get_train_data_path()), store.get_full_path(store.get_val_data_path()))
    key += (tuple(columns), validation, compress_sparse, files, random_seed)  # type: ignore[assignment]
    with _lock:
        for entry in _entries:
            if entry.df is df and entry.key == key and _is_there(store, entry.written):
                return entry.written
        store.check_writable()
        with _parts(df, columns, validation, random_seed) as parts:
            selected = [
                None if part is None else schema.written(part, columns, compress_sparse).repartition(files)
                for part in parts
            ]
            written = _write_pair(store, df, selected[0], selected[1])
        if verbose > 0:
            print(f"wrote {written.train_rows} rows to {store.get_train_data_path(written.number)}", flush=True)
        _entries.append(_Entry(df, key, written))
        del _entries[:-ENTRIES_MAX]
    return written


def _is_there(store: Store, written: DataSet) -> bool:
    return store.exists(store.get_train_data_path(written.number))


@contextlib.contextmanager
def _parts(df: Any, columns: list[str], validation: Any, random_seed: int | None) -> Iterator[tuple[Any, Any]]:
    """A context, whose value is the rows for training and those for validation, or None.

    Both parts are written one after the other. They are of one evaluation of the DataFrame, which stays on the
    executors' disks in between: of one whose values change, a row might be in both parts otherwise, or in none.
    """
    if not validation:
        yield df, None
        return
    chosen = sql.lit(False)
    if isinstance(validation, str):
        chosen = sql.coalesce(df[validation].cast("double") > 0, sql.lit(False))
    # Also a share gets the column, so that no plan that the program itself has cached is the same: `unpersist` would
    # drop that.
    kept = df.select(*[df[name] for name in columns], chosen.alias(_CHOSEN)).persist(StorageLevel.DISK_ONLY)
    try:
        yield _split(kept, validation, random_seed)
    finally:
        kept.unpersist()


def _split(kept: Any, validation: Any, random_seed: int | None) -> tuple[Any, Any]:
    if isinstance(validation, str):
        return kept.filter(~kept[_CHOSEN]), kept.filter(kept[_CHOSEN])
    # A seed of its own, so that both parts are of the same draw.
    train, val = kept.randomSplit([1.0 - validation, validation], seed=0 if random_seed is None else random_seed)
    return train, val


def _write_pair(store: Store, df: Any, train: Any, val: Any) -> DataSet:
    spark = df.sparkSession
    index = store.next_index()
    for attempt in range(ATTEMPTS):
        try:
            train_rows = _write_one(spark, store, train, store.get_train_data_path(index), "training")
            break
        except Exception as error:
            # Another program took the number since.
            if _EXISTS not in str(error) or attempt + 1 == ATTEMPTS:
                raise
            index += 1
    try:
        val_rows = 0
        if val is not None:
            val_rows = _write_one(spark, store, val, store.get_val_data_path(index), "validation")
    except BaseException:
        store.remove(store.get_train_data_path(index))
        raise
    return DataSet(index, train_rows, val_rows)


def _write_one(spark: Any, store: Store, df: Any, path: str, purpose: str) -> int:
    """Writes a data set and checks it. Removes it if it is of no use."""
    full = store.get_full_path(path)
    try:
        df.write.mode("errorifexists").parquet(full)
        if not store.exists(path):
            raise OSError(
                f"Spark has written {full}, but this process does not see it; a store is in a folder, or on a "
                "filesystem, that the driver and all executors share"
            )
        rows = schema.check_written(spark.read.schema(df.schema).parquet(full), full)
        if rows == 0:
            raise ValueError(f"there are no rows for {purpose}; the DataFrame, or this part of it, is empty")
    except BaseException as error:
        # What another program has written there is not removed.
        if _EXISTS not in str(error):
            store.remove(path)
        raise
    return rows


def rows_of(store: Store, path: str) -> int:
    """Returns the number of rows of a data set, from its files' footers. Raises ValueError if there are none."""
    if not store.is_parquet_dataset(path):
        raise ValueError(f"there is no Parquet data set at {path}; write one there, or call prepare_data")
    rows = sum(group.rows for group in row_groups(store.get_localized_path(path), store.arrow_filesystem()))
    if rows == 0:
        raise ValueError(f"the data set at {path} has no rows")
    return rows
