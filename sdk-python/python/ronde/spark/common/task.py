"""What an estimator sends to the processes that train."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ronde.spark.data.module import DataModule, ParquetDataModule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.spark.common.store import RemoteStore


@dataclass
class Task:
    """One training: data, sizes and settings, which are the same on all ranks.

    remote       -- paths of data sets and of the run
    has_val      -- whether there are validation data
    features, labels, weight -- names of columns
    metadata     -- type and shape of each column: {name: {"dtype": "float64", "shape": [2]}}
    train_steps, val_steps   -- batches of an epoch
    first_epoch, last_epoch  -- the number of the first epoch, and that after the last one
    begun_epoch  -- that of the first epoch of the interrupted training that this one completes, else first_epoch
    settings     -- further parameters of the estimator, by name
    payload      -- what the framework needs: the model and its companions, as bytes
    """

    remote: RemoteStore
    has_val: bool
    features: list[str]
    labels: list[str]
    weight: str | None
    metadata: dict[str, Any]
    train_steps: int
    val_steps: int
    first_epoch: int
    last_epoch: int
    settings: dict[str, Any] = field(default_factory=dict)
    payload: dict[str, Any] = field(default_factory=dict)
    begun_epoch: int = 0

    def columns(self) -> list[str]:
        """Returns the columns that are read."""
        weights = [self.weight] if self.weight else []
        return list(dict.fromkeys([*self.features, *self.labels, *weights]))

    def data(self, rank: int, size: int) -> DataModule:
        """Returns the data module of a rank."""
        known, store = self.settings, self.remote.store
        kind: Any = known.get("data_module") or ParquetDataModule
        made: DataModule = kind(
            train_dir=store.get_localized_path(self.remote.train_data_path),
            val_dir=store.get_localized_path(self.remote.val_data_path) if self.has_val else None,
            num_train_epochs=self.last_epoch - self.first_epoch,
            has_val=self.has_val,
            train_batch_size=known["batch_size"],
            val_batch_size=known["val_batch_size"] or known["batch_size"],
            shuffle=known["shuffle"] and known["shuffle_buffer_size"] != 0,
            transform_fn=known["transformation_fn"],
            inmemory_cache_all=known["inmemory_cache_all"],
            cur_shard=rank,
            shard_count=size,
            schema_fields=self.columns(),
            storage_options=getattr(store, "storage_options", {}),
            steps_per_epoch_train=self.train_steps,
            steps_per_epoch_val=self.val_steps,
            verbose=known["verbose"] > 1,
            filesystem=store.arrow_filesystem(),
            random_seed=known["random_seed"],
            shuffle_buffer_size=known["shuffle_buffer_size"],
            first_epoch=self.first_epoch,
            train_reader_worker_count=known["train_reader_num_workers"],
            val_reader_worker_count=known["val_reader_num_workers"],
            reader_pool_type=known["reader_pool_type"],
            mp_start_method=known["mp_start_method"],
            transformation_edit_fields=known["transformation_edit_fields"],
            transformation_removed_fields=known["transformation_removed_fields"],
            train_async_data_loader_queue_size=known["train_async_data_loader_queue_size"],
            val_async_data_loader_queue_size=known["val_async_data_loader_queue_size"],
            debug_data_loader=known["debug_data_loader"],
        )
        return made


def column_of(batch: Any, name: str) -> Any:
    """Returns a column of a batch. Raises KeyError that names the column and those of the batch."""
    try:
        return batch[name]
    except KeyError:
        raise KeyError(
            f"the batch has no column {name!r}, but {', '.join(map(repr, batch))}; transformation_fn and data_module "
            "must give all feature, label and weight columns"
        ) from None


def check_shapes(metadata: dict[str, Any], columns: Sequence[str], shapes: Sequence[Any] | None) -> None:
    """Raises ValueError with the name of a column whose rows do not have as many values as their shape.

    metadata -- as in Task. A shape may also be the number of values, or None for one that varies
    shapes   -- for each column the shape of a row, or of a batch with -1 or None first; None is not compared
    """
    for name, shape in zip(columns, shapes or ()):
        found = metadata[name]["shape"]
        if shape is None or found is None:
            continue
        values = found if isinstance(found, int) else math.prod(found)
        given = [-1 if each is None else int(each) for each in shape]
        inner = given[1:] if given[:1] == [-1] else given
        known = math.prod(each for each in inner if each != -1)
        if values % max(known, 1) or (-1 not in inner and values != known):
            raise ValueError(f"column {name!r} has {values} values a row, which do not fit the shape {given}")


def shape_of_rows(given: Any, rows: int) -> tuple[int, ...]:
    """Returns the shape of a batch for the shape of a row; the first dimension, the rows, is -1."""
    shape = [int(each) for each in given]
    return tuple(shape) if -1 in shape else (rows, *shape)
