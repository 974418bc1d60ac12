"""The keyword arguments that constructors of estimators and of their models share, for type checkers.

Spark ML binds them by name. What each is, and what it is by default, is in `params`.
"""

from __future__ import annotations

from typing import Any, TypedDict


class EstimatorKeywords(TypedDict, total=False):
    """Arguments of all estimators."""

    num_proc: int | None
    backend: Any
    store: Any
    data_module: Any
    model: Any
    optimizer: Any
    loss: Any
    loss_weights: Any
    metrics: Any
    sample_weight_col: str | None
    gradient_compression: Any
    compress_sparse_cols: bool | None
    feature_cols: Any
    label_cols: Any
    continuous_cols: Any
    categorical_cols: Any
    validation: Any
    callbacks: Any
    random_seed: int | None
    batch_size: int | None
    val_batch_size: int | None
    epochs: int | None
    train_steps_per_epoch: int | None
    validation_steps_per_epoch: int | None
    verbose: int | None
    shuffle_buffer_size: int | None
    shuffle: bool
    partitions_per_process: int | None
    run_id: str | None
    transformation_fn: Any
    transformation_edit_fields: Any
    transformation_removed_fields: Any
    train_reader_num_workers: int | None
    val_reader_num_workers: int | None
    reader_pool_type: str | None
    label_shapes: Any
    inmemory_cache_all: bool
    use_gpu: bool
    mp_start_method: str | None
    debug_data_loader: bool
    train_async_data_loader_queue_size: int | None
    val_async_data_loader_queue_size: int | None


class ModelKeywords(TypedDict, total=False):
    """Arguments of all models."""

    history: Any
    model: Any
    feature_columns: Any
    label_columns: Any
    run_id: str | None
    outputCols: Any
    categorical_cols: Any
    _metadata: Any
