"""Loaders of batches of PyTorch's tensors. Their reader is `ronde.spark.data.ShardReader`."""

from __future__ import annotations

from typing import Any, NoReturn

from ronde.spark.data.pytorch import (
    PytorchAsyncDataLoader,
    PytorchDataLoader,
    PytorchInfiniteAsyncDataLoader,
    PytorchInfiniteDataLoader,
    PytorchInmemAsyncDataLoader,
    PytorchInmemDataLoader,
)

__all__ = [
    "PetastormBatchedDataLoader",
    "PytorchAsyncDataLoader",
    "PytorchDataLoader",
    "PytorchInfiniteAsyncDataLoader",
    "PytorchInfiniteDataLoader",
    "PytorchInmemAsyncDataLoader",
    "PytorchInmemDataLoader",
]


def PetastormBatchedDataLoader(*arguments: Any, **options: Any) -> NoReturn:  # noqa: N802 -- Horovod's name
    """Raises RuntimeError with the alternative."""
    raise RuntimeError(
        "PetastormBatchedDataLoader is for a reader of Petastorm, which horovod-compat does not use; "
        "PytorchDataLoader(ronde.spark.data.ShardReader(path), batch_size, shuffling_queue_capacity) reads "
        "the same files"
    )
