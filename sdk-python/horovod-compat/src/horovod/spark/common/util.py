"""Helpers for data sets of estimators."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from horovod.runner.common.util.host_hash import host_hash
from horovod.spark.common.types import (
    data_type_to_numpy,
    data_type_to_str,
    numpy_type_to_str,
    pyarrow_to_spark_data_type,
    spark_scalar_to_python_type,
)
from ronde.spark.common.util import (
    check_shape_compatibility,
    check_validation,
    clear_training_cache,
    get_simple_meta_from_parquet,
    prepare_data,
)

__all__ = [
    "check_shape_compatibility",
    "check_validation",
    "clear_training_cache",
    "data_type_to_numpy",
    "data_type_to_str",
    "get_dataset_properties",
    "get_simple_meta_from_parquet",
    "host_hash",
    "is_databricks",
    "numpy_type_to_str",
    "prepare_data",
    "pyarrow_to_spark_data_type",
    "spark_scalar_to_python_type",
    "to_list",
    "to_petastorm_fn",
]


def is_databricks() -> bool:
    """Returns whether this process runs on Databricks."""
    return "DATABRICKS_RUNTIME_VERSION" in os.environ


def to_list(var: Any, length: int) -> list[Any] | None:
    """Returns a value as a list of `length` values: one that is no list is repeated, and None stays.

    Raises ValueError for a list of another length.
    """
    if var is None:
        return None
    if not isinstance(var, list):
        return [var] * length
    if len(var) != length:
        raise ValueError(f"the list has {len(var)} values instead of {length}; give one for each")
    return var


def get_dataset_properties(dataset_idx: int) -> NoReturn:
    """Raises RuntimeError with the alternative."""
    raise RuntimeError(
        "horovod.spark.common.util.get_dataset_properties reads what Horovod keeps in memory of the data sets that it "
        "has written; call get_simple_meta_from_parquet(store, label_columns, feature_columns, "
        f"dataset_idx={dataset_idx}), which reads it from the files"
    )


def to_petastorm_fn(schema_cols: Any, metadata: Any) -> NoReturn:
    """Raises RuntimeError with the alternative."""
    raise RuntimeError(
        "horovod.spark.common.util.to_petastorm_fn converts rows for Petastorm, which horovod-compat does not use: "
        "estimators and prepare_data write DataFrames as they are"
    )
