"""Loaders of batches of PyTorch's tensors, with Horovod's names and arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ronde.data import AsyncDataLoaderMixin
from ronde.spark.data.loader import ParquetDataLoader
from ronde.spark.torch.batches import tensor_of

if TYPE_CHECKING:
    from ronde.spark.data.reader import ShardReader


class PytorchDataLoader(ParquetDataLoader):
    """Batches of a rank's rows, as dictionaries of tensors by column.

    reader -- reads the rows: `ronde.spark.data.ShardReader`
    batch_size -- rows of a batch
    shuffling_queue_capacity -- how many rows are mixed; 0: no shuffling
    name   -- in what is printed
    limit_step_per_epoch -- batches of one iteration; -1: as many as give each row once
    verbose -- whether to print how many batches an iteration had
    """

    def __init__(
        self,
        reader: ShardReader,
        batch_size: int,
        shuffling_queue_capacity: int,
        name: str = "",
        limit_step_per_epoch: int = -1,
        verbose: bool = False,
        **options: Any,
    ) -> None:
        self.name, self.verbose = name, verbose
        super().__init__(
            reader,
            batch_size,
            steps=None if limit_step_per_epoch < 0 else limit_step_per_epoch,
            shuffle=shuffling_queue_capacity > 0,
            buffer_rows=shuffling_queue_capacity or None,
            **options,
        )

    def _iterate(self) -> Any:
        yield from super()._iterate()
        if self.verbose:
            print(f"[{self.name}] {self.steps} batches", flush=True)

    def _process_batch(self, batch: Any) -> Any:
        return {name: array if array.dtype == object else tensor_of(array) for name, array in batch.items()}


class PytorchAsyncDataLoader(AsyncDataLoaderMixin, PytorchDataLoader):
    """PytorchDataLoader whose batches a thread reads in advance."""


class PytorchInfiniteDataLoader(PytorchDataLoader):
    """PytorchDataLoader for more batches than the rows give: passes continue where the one before ended."""


class PytorchInfiniteAsyncDataLoader(AsyncDataLoaderMixin, PytorchInfiniteDataLoader):
    """PytorchInfiniteDataLoader whose batches a thread reads in advance."""


class PytorchInmemDataLoader(PytorchDataLoader):
    """PytorchDataLoader that keeps a rank's rows in memory after the first pass.

    num_epochs -- accepted for Horovod's programs; has no effect
    shuffle    -- whether to shuffle the rows of each pass

    The other arguments are those of PytorchDataLoader.
    """

    def __init__(
        self,
        reader: ShardReader,
        batch_size: int,
        num_epochs: int | None = None,
        name: str = "",
        shuffle: bool = False,
        limit_step_per_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        del num_epochs
        super().__init__(reader, batch_size, int(shuffle), name, limit_step_per_epoch, verbose, cache=True)


class PytorchInmemAsyncDataLoader(AsyncDataLoaderMixin, PytorchInmemDataLoader):
    """PytorchInmemDataLoader whose batches a thread reads in advance."""
