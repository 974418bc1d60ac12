"""Helpers for data sets of estimators, with Horovod's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow.dataset

from ronde.spark.common.prepare import clear_training_cache, prepare_data, rows_of
from ronde.spark.common.schema import check_validation
from ronde.spark.common.task import check_shapes
from ronde.spark.data.columns import arrays_of
from ronde.spark.data.columns import rows_of as rows_of_block
from ronde.spark.data.reader import check_columns
from ronde.spark.data.shuffle import bytes_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.spark.common.store import Store

__all__ = [
    "check_shape_compatibility",
    "check_validation",
    "clear_training_cache",
    "get_simple_meta_from_parquet",
    "prepare_data",
]

SAMPLED_ROWS = 100
"""How many rows are read to estimate the size of a row."""


def get_simple_meta_from_parquet(
    store: Store,
    label_columns: Sequence[str],
    feature_columns: Sequence[str],
    sample_weight_col: str | None = None,
    dataset_idx: int | None = None,
) -> tuple[int, int, dict[str, Any], float]:
    """Returns what is known of a store's data sets: rows for training, rows for validation, columns, bytes of a row.

    The columns are {name: {"dtype": "float64", "shape": [2]}}. Raises ValueError where there is no data set, and for
    columns that it lacks.
    """
    path, val_path = store.get_train_data_path(dataset_idx), store.get_val_data_path(dataset_idx)
    train_rows = rows_of(store, path)
    val_rows = rows_of(store, val_path) if store.is_parquet_dataset(val_path) else 0
    weights = [sample_weight_col] if sample_weight_col else []
    columns = list(dict.fromkeys([*label_columns, *feature_columns, *weights]))
    found = pyarrow.dataset.dataset(
        store.get_localized_path(path), filesystem=store.arrow_filesystem(), format="parquet"
    )
    check_columns(found.schema, columns, path)
    sample = arrays_of(found.head(SAMPLED_ROWS, columns=columns))
    metadata = {name: {"dtype": str(array.dtype), "shape": list(array.shape[1:])} for name, array in sample.items()}
    return train_rows, val_rows, metadata, bytes_of(sample) / max(rows_of_block(sample), 1)


def check_shape_compatibility(
    metadata: dict[str, Any],
    feature_columns: Sequence[str],
    label_columns: Sequence[str],
    input_shapes: Sequence[Any] | None = None,
    output_shapes: Sequence[Any] | None = None,
    label_shapes: Sequence[Any] | None = None,
) -> None:
    """Raises ValueError if columns do not fit a model: their number, or the values of a row.

    metadata      -- as `get_simple_meta_from_parquet` returns it; a shape may also be a number of values, or None for
                     one that varies
    input_shapes, output_shapes -- of the model: the shape of a row of each feature and label, or of a batch with -1 or
                     None first
    label_shapes  -- the shapes of the labels where these are not those of the outputs, as with numbers of classes
    """
    for columns, shapes, what in (
        (feature_columns, input_shapes, "feature columns, but the model has {} inputs"),
        (label_columns, output_shapes, "label columns, but the model has {} outputs"),
        (label_columns, label_shapes, "label columns, but there are {} label_shapes"),
    ):
        if shapes is not None and len(shapes) != len(columns):
            raise ValueError(f"there are {len(columns)} {what.format(len(shapes))}")
    check_shapes(metadata, feature_columns, input_shapes)
    check_shapes(metadata, label_columns, output_shapes if label_shapes is None else label_shapes)
