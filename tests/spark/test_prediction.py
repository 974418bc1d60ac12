"""Which values of columns `transform` takes: those that training takes."""

from __future__ import annotations

import decimal
import math
from typing import Any

import numpy
import pytest
import torch
from pyspark.ml.linalg import Vectors, VectorUDT
from pyspark.sql import types
from ronde.spark.torch import TorchModel


class Sum(torch.nn.Module):
    """Adds all numbers of a row."""

    def forward(self, *inputs: Any) -> Any:
        return sum(each.reshape(len(each), -1).sum(1) for each in inputs)


def transformer(shape: list[int], dtype: str = "float64", model: Any = None) -> TorchModel:
    described = {"x": {"dtype": dtype, "shape": shape}}
    return TorchModel(model=model or Sum(), feature_columns=["x"], label_columns=["y"], _metadata=described)


def predictions(spark: Any, kind: str, shape: list[int], *values: Any) -> list[float]:
    df = spark.createDataFrame([(value,) for value in values], f"x {kind}")
    return [row[0] for row in transformer(shape).transform(df).select("y__output").collect()]


def test_decimals_are_doubles_also_in_arrays(spark: Any) -> None:
    half, two = decimal.Decimal("0.5"), decimal.Decimal(2)
    assert predictions(spark, "decimal(10,2)", [], half, two) == [0.5, 2.0]
    assert predictions(spark, "array<decimal(10,2)>", [2], [half, two], [two, two]) == [2.5, 4.0]
    assert predictions(spark, "array<array<decimal(10,2)>>", [1, 2], [[half, two]], [[two, two]]) == [2.5, 4.0]


def test_nan_is_a_number_and_null_is_not(spark: Any) -> None:
    found = predictions(spark, "double", [], 1.0, math.nan)
    assert found[0] == 1.0
    assert math.isnan(found[1])
    assert math.isnan(predictions(spark, "array<double>", [2], [1.0, math.nan])[0])
    df = spark.createDataFrame([([1.0, math.nan],)], "x array<double>")
    vector = transformer([2], model=torch.nn.Identity()).transform(df).collect()[0]["y__output"]
    assert vector[0] == 1.0
    assert math.isnan(vector[1])
    for kind, shape, value in [
        ("double", [], None),
        ("int", [], None),
        ("decimal(10,2)", [], None),
        ("array<double>", [2], [1.0, None]),
        ("array<array<double>>", [1, 2], [[1.0, None]]),
    ]:
        with pytest.raises(Exception, match="column 'x' has null values"):
            predictions(spark, kind, shape, value)
    vectors = types.StructType([types.StructField("x", VectorUDT())])
    df = spark.createDataFrame([(Vectors.dense([1.0, 2.0]),), (None,)], vectors)
    # Without metadata, the first row has the shape.
    given = TorchModel(model=Sum(), feature_columns=["x"], label_columns=["y"])
    with pytest.raises(Exception, match="column 'x' has null values"):
        given.transform(df).collect()
    assert given.transform(df.limit(1)).collect()[0]["y__output"] == 3.0


LARGE = 16777217
"""The first whole number that float32 does not have."""


def test_predictions_keep_the_precision_of_doubles() -> None:
    given = TorchModel(
        model=torch.nn.Identity(), feature_columns=["x"], label_columns=["y"], categorical_cols=["x"]
    ).get_prediction_fn()
    assert given({"x": numpy.array([LARGE])})[0].tolist() == [LARGE]
    torch.set_default_dtype(torch.float64)
    try:
        assert transformer([]).get_prediction_fn()({"x": numpy.array([0.1])})[0].tolist() == [0.1]
    finally:
        torch.set_default_dtype(torch.float32)


class Rows:
    """A DataFrame with one column and these rows."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def select(self, names: list[str]) -> Rows:
        assert names == ["x"]
        return self

    def head(self, count: int) -> list[dict[str, Any]]:
        return [{"x": value} for value in self.values[:count]]


@pytest.mark.parametrize(
    ("described", "shapes", "values", "shape", "dtype"),
    [
        ({"shape": [3], "dtype": "int64"}, None, [], (3,), "int64"),
        # Horovod's metadata: how many values a row has.
        ({"shape": 2, "intermediate_format": "nochange"}, None, [], (2,), "float64"),
        ({"shape": 1}, None, [], (), "float64"),
        (None, [[2]], [], (2,), "float64"),
        (None, [[-1, 1, 8]], [], (1, 8), "float64"),
        ({"shape": None}, None, [[1, 2]], (2,), "int64"),
        (None, None, [Vectors.sparse(4, {1: 2.0})], (4,), "float64"),
        (None, [[2, -1]], [[[1.0, 2.0]]], (1, 2), "float64"),
        (None, None, [decimal.Decimal(1)], (), "float64"),
    ],
)
def test_shapes_are_those_of_metadata_or_parameters_or_the_first_row(
    described: Any, shapes: Any, values: list[Any], shape: tuple[int, ...], dtype: str
) -> None:
    given = TorchModel(
        model=Sum(),
        feature_columns=["x"],
        label_columns=["y"],
        input_shapes=shapes,
        _metadata=None if described is None else {"x": described},
    )
    found = given.example(df=Rows(*values))["x"]
    assert (found.shape, str(found.dtype)) == ((2, *shape), dtype)


def test_a_model_without_shapes_names_the_parameter() -> None:
    given = TorchModel(model=Sum(), feature_columns=["x"], label_columns=["y"])
    for df in (None, Rows(), Rows(None)):
        with pytest.raises(ValueError, match=r"the shape of the feature column 'x' is not known: .* _metadata="):
            given.example(df=df)
    sized = TorchModel(model=torch.nn.Linear(2, 3), feature_columns=["x"], label_columns=["y"], input_shapes=[[2]])
    assert sized._output_sizes(None) == [3]


@pytest.mark.parametrize("kind", ["string", "binary", "array<string>"])
def test_a_column_that_only_a_transformation_makes_numbers_of_is_named(spark: Any, kind: str) -> None:
    df = spark.createDataFrame([], f"x {kind}")
    with pytest.raises(ValueError, match=r"column 'x' has the type .* transform does not call transformation_fn"):
        transformer([], "object").transform(df)
