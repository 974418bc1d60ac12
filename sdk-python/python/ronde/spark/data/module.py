"""Data modules: what an estimator reads batches by. A program may give its own class."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from ronde.spark.data.loader import AsyncParquetDataLoader, transform_of
from ronde.spark.data.reader import ShardReader

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

QUEUE_BATCHES = 16
"""How many batches are prefetched by default."""


class DataModule(ABC):
    """Gives a rank its batches. An estimator makes one in each process, as a context, and calls both methods once.

    A subclass is the estimator's `data_module`. It gets these arguments by keyword, and more that it may ignore.

    train_dir, val_dir -- the data sets, as `filesystem` knows their paths
    num_train_epochs   -- how often the training data is iterated over
    has_val            -- whether there are validation data
    train_batch_size, val_batch_size -- rows of a batch
    shuffle            -- whether to shuffle training data
    transform_fn       -- the estimator's `transformation_fn`
    inmemory_cache_all -- whether to keep the data in memory
    cur_shard, shard_count -- this rank, and the number of ranks
    schema_fields      -- the columns to read
    storage_options    -- of the store
    steps_per_epoch_train, steps_per_epoch_val -- batches of one iteration. All ranks must give exactly so many
    verbose            -- whether to print more
    """

    def __init__(
        self,
        train_dir: str,
        val_dir: str | None,
        num_train_epochs: int = 1,
        has_val: bool = True,
        train_batch_size: int = 32,
        val_batch_size: int = 32,
        shuffle: bool = True,
        transform_fn: Any = None,
        inmemory_cache_all: bool = False,
        cur_shard: int = 0,
        shard_count: int = 1,
        schema_fields: Sequence[str] | None = None,
        storage_options: dict[str, Any] | None = None,
        steps_per_epoch_train: int | None = 1,
        steps_per_epoch_val: int | None = 1,
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        self.train_dir, self.val_dir, self.has_val = train_dir, val_dir, has_val
        self.num_train_epochs, self.shuffle = num_train_epochs, shuffle
        self.train_batch_size, self.val_batch_size = train_batch_size, val_batch_size
        self.transform_fn, self.inmemory_cache_all = transform_fn, inmemory_cache_all
        self.cur_shard, self.shard_count = cur_shard, shard_count
        self.schema_fields, self.storage_options = schema_fields, storage_options
        self.steps_per_epoch_train, self.steps_per_epoch_val = steps_per_epoch_train, steps_per_epoch_val
        self.verbose = verbose
        self.options = kwargs

    def __enter__(self) -> DataModule:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @abstractmethod
    def train_data(self) -> Iterable[Any]:
        """Returns what yields one epoch's batches each time it is iterated over: dictionaries of arrays by column."""

    @abstractmethod
    def val_data(self) -> Iterable[Any]:
        """Returns the same for validation. Is called only if there are validation data."""


class ParquetDataModule(DataModule):
    """Batches from Parquet by pyarrow; what estimators use unless `data_module` is given.

    Further options, besides those of DataModule: `filesystem` (a `pyarrow.fs.FileSystem`), `random_seed`,
    `shuffle_buffer_size` (rows), `first_epoch`, `train_reader_worker_count`, `val_reader_worker_count`,
    `reader_pool_type`, `mp_start_method`, `transformation_edit_fields`, `transformation_removed_fields`,
    `train_async_data_loader_queue_size`, `val_async_data_loader_queue_size` (batches), and `debug_data_loader`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loaders: list[AsyncParquetDataLoader] = []

    def __exit__(self, *_: object) -> None:
        for loader in self._loaders:
            loader.close_async_loader()
            loader.reader.close()

    def train_data(self) -> Iterable[Any]:
        """Returns the loader of training data."""
        return self._loader("train", self.train_dir, self.train_batch_size, self.steps_per_epoch_train, self.shuffle)

    def val_data(self) -> Iterable[Any]:
        """Returns the loader of validation data, which are not shuffled."""
        assert self.val_dir is not None
        return self._loader("val", self.val_dir, self.val_batch_size, self.steps_per_epoch_val, False)

    def _loader(self, part: str, path: str, batch_size: int, steps: int | None, shuffle: bool) -> Iterable[Any]:
        option = self.options.get
        reader = ShardReader(
            path,
            self.cur_shard,
            self.shard_count,
            self.schema_fields,
            option("filesystem"),
            option(f"{part}_reader_worker_count"),
            option("reader_pool_type"),
            option("mp_start_method"),
        )
        queue = option(f"{part}_async_data_loader_queue_size")
        loader = AsyncParquetDataLoader(
            async_loader_queue_size=QUEUE_BATCHES if queue is None else queue,
            debug_data_loader=bool(option("debug_data_loader")),
            reader=reader,
            batch_size=batch_size,
            steps=steps,
            shuffle=shuffle,
            seed=option("random_seed"),
            buffer_rows=option("shuffle_buffer_size"),
            first_pass=option("first_epoch") or 0,
            transform=transform_of(self.transform_fn, removed=option("transformation_removed_fields")),
            cache=self.inmemory_cache_all,
        )
        self._loaders.append(loader)
        return loader
