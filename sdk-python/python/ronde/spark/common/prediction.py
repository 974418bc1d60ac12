"""Adds the predictions of a model to a DataFrame."""

from __future__ import annotations

import math
import typing
from typing import Any, Callable

import numpy
import pyspark.ml.functions
import pyspark.sql.functions as sql
from pyspark.ml.linalg import VectorUDT
from pyspark.mllib.linalg import VectorUDT as OldVectorUDT
from pyspark.sql import types

from ronde.spark.common.schema import array_of_vector, check_present

Predict = Callable[[dict[str, Any]], "list[Any]"]


def predicted(
    df: Any, features: list[str], outputs: list[str], predictor: Callable[[], Predict], sizes: list[int]
) -> Any:
    """Returns a DataFrame with predictions in further columns.

    features  -- the columns that the model takes
    outputs   -- the names of the further columns
    predictor -- returns, in each task of Spark, the function that predicts: from arrays by column to a list of arrays
    sizes     -- the number of values of each output for a row: 1 gives doubles, more give vectors
    """
    check_present(df, features, "the feature column")
    if present := [name for name in outputs if name in df.columns]:
        raise ValueError(f"the DataFrame has a column {present[0]!r} already; name others by setOutputCols")
    fields = [
        types.StructField(f"o{index}", types.DoubleType() if size == 1 else types.ArrayType(types.DoubleType()))
        for index, size in enumerate(sizes)
    ]
    predict = sql.pandas_udf(_over_frames(predictor, features, sizes), types.StructType(fields))
    inputs = [_plain(df, name).alias(f"f{index}") for index, name in enumerate(features)]
    # pandas has NaN for a null among numbers, so it is asked for while Spark can tell both apart.
    nulls = [_has_null(df[name], df.schema[name].dataType).alias(f"n{index}") for index, name in enumerate(features)]
    found = predict(sql.struct(*inputs, *nulls))
    added = []
    for index, (name, size) in enumerate(zip(outputs, sizes)):
        column = found[f"o{index}"]
        is_vector = size > 1
        numbers = sql.transform(column, _number) if is_vector else _number(column)
        added.append((pyspark.ml.functions.array_to_vector(numbers) if is_vector else numbers).alias(name))
    return df.select("*", *added)


def _number(column: Any) -> Any:
    """A prediction: Spark reads a NaN of pandas as null, and no prediction is null."""
    return sql.coalesce(column, sql.lit(math.nan))


def _plain(df: Any, name: str) -> Any:
    """A feature column without Spark's own types, and with doubles for decimals, as in training."""
    kind = df.schema[name].dataType
    if isinstance(kind, (VectorUDT, OldVectorUDT)):
        return array_of_vector(df[name])
    plain = _without_decimals(kind)
    return df[name] if plain == kind else df[name].cast(plain)


def _without_decimals(kind: Any) -> Any:
    if isinstance(kind, types.ArrayType):
        return types.ArrayType(_without_decimals(kind.elementType), kind.containsNull)
    return types.DoubleType() if isinstance(kind, types.DecimalType) else kind


def _has_null(column: Any, kind: Any) -> Any:
    """Whether a row of a column is null, or has a null in its arrays."""
    if not isinstance(kind, types.ArrayType):
        return column.isNull()
    return column.isNull() | sql.exists(column, lambda element: _has_null(element, kind.elementType))


def _over_frames(predictor: Callable[[], Predict], features: list[str], sizes: list[int]) -> Any:
    import pandas

    def predict_frames(frames: Any) -> Any:
        predict = predictor()
        for frame in frames:
            for index, name in enumerate(features):
                if frame[f"n{index}"].any():
                    raise ValueError(f"column {name!r} has null values; a model cannot predict from them")
            batch = {name: _array(frame[f"f{index}"]) for index, name in enumerate(features)}
            outputs = predict(batch) if len(frame) else [numpy.zeros((0, size)) for size in sizes]
            yield pandas.DataFrame(
                {
                    f"o{index}": _cells(output, len(frame), size)
                    for index, (output, size) in enumerate(zip(outputs, sizes))
                }
            )

    # Spark reads the kind of the function from these, which must be objects and not strings.
    frames_type = typing.Iterator[pandas.DataFrame]
    predict_frames.__annotations__ = {"frames": frames_type, "return": frames_type}
    return predict_frames


def _array(column: Any) -> Any:
    """A column of a pandas.DataFrame as an array."""
    if column.dtype != object:
        return column.to_numpy()
    return numpy.stack([_nested(cell) for cell in column]) if len(column) else numpy.zeros(0)


def _nested(cell: Any) -> Any:
    """A list of numbers, or of lists of numbers, as an array."""
    array = numpy.asarray(cell)
    return numpy.stack([_nested(inner) for inner in array]) if array.dtype == object and array.ndim else array


def _cells(output: Any, rows: int, size: int) -> Any:
    """An output as cells of a pandas.DataFrame: numbers, or lists."""
    array = numpy.asarray(output, dtype=numpy.float64).reshape(rows, size)
    return array[:, 0] if size == 1 else list(array)
