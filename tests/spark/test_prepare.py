"""The parts of a DataFrame for training and for validation are those of one evaluation of it."""

from __future__ import annotations

import pathlib
import random
from typing import Any

import pyarrow.parquet
import pytest
from pyspark.sql import functions as sql
from ronde.spark.common.prepare import prepare_data
from ronde.spark.common.store import LocalStore

ROWS = 200


@pytest.mark.parametrize("validation", [0.5, "held"])
def test_each_row_is_in_one_part_though_the_data_changes(spark: Any, tmp_path: pathlib.Path, validation: Any) -> None:
    store, drawn = LocalStore(str(tmp_path)), sql.udf(random.random, "double").asNondeterministic()
    # A share is drawn from the rows in the order of their values, which change with each evaluation as well.
    df = spark.range(ROWS).select(drawn().alias("x"), sql.col("id").alias("y"))
    df = df.withColumn("held", (drawn() > 0.5).cast("int"))
    program_keeps = df.select("x", "y").persist()
    with prepare_data(1, store, df, ["y"], ["x"], validation, partitions_per_process=1) as index:
        paths = [store.get_train_data_path(index), store.get_val_data_path(index)]
    parts = [pyarrow.parquet.read_table(store.get_localized_path(path))["y"].to_pylist() for path in paths]
    assert all(parts)
    assert sorted([*parts[0], *parts[1]]) == list(range(ROWS))
    assert program_keeps.is_cached
    program_keeps.unpersist()
    assert spark._jsparkSession.sharedState().cacheManager().isEmpty(), "nothing is left on the executors' disks"
