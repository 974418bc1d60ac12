"""Which values of columns `transform` takes: those that training takes."""

from __future__ import annotations

import decimal
import math
from typing import Any

import pytest
import torch
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


@pytest.mark.parametrize("kind", ["string", "binary", "array<string>"])
def test_a_column_that_only_a_transformation_makes_numbers_of_is_named(spark: Any, kind: str) -> None:
    df = spark.createDataFrame([], f"x {kind}")
    with pytest.raises(ValueError, match=r"column 'x' has the type .* transform does not call transformation_fn"):
        transformer([], "object").transform(df)
