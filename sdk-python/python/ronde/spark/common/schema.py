"""Columns of a DataFrame on their way to Parquet: which types are possible, conversions, and checks of what is written.

Vectors of Spark ML become lists of doubles; with `compress_sparse`, vectors in columns that have sparse ones become
structs of size, indices and values, which readers make dense again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyspark.ml.functions
import pyspark.sql.functions as sql
from pyspark.ml.linalg import VectorUDT
from pyspark.mllib.linalg import VectorUDT as OldVectorUDT
from pyspark.sql import types

from ronde.spark.data.columns import SPARSE_FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NUMBERS = (types.NumericType, types.BooleanType)
_OBJECTS = (types.StringType, types.BinaryType)
_SPARSE = types.StructType(
    [
        types.StructField(SPARSE_FIELDS[0], types.IntegerType()),
        types.StructField(SPARSE_FIELDS[1], types.ArrayType(types.IntegerType())),
        types.StructField(SPARSE_FIELDS[2], types.ArrayType(types.DoubleType())),
    ]
)


def check_present(df: Any, columns: Iterable[str], purpose: str) -> None:
    """Raises ValueError with the names of columns that a DataFrame lacks."""
    if missing := [name for name in columns if name not in df.columns]:
        raise ValueError(
            f"{purpose} {', '.join(map(repr, missing))} {'is' if len(missing) == 1 else 'are'} not in the DataFrame, "
            f"whose columns are {', '.join(df.columns)}"
        )


def check_types(df: Any, columns: Iterable[str]) -> None:
    """Raises ValueError with the name of a column whose type no model takes."""
    for name in columns:
        kind = df.schema[name].dataType
        if not isinstance(kind, (VectorUDT, OldVectorUDT, *_OBJECTS)) and not isinstance(_innermost(kind), _NUMBERS):
            raise ValueError(
                f"column {name!r} has the type {kind.simpleString()}; estimators take numbers, booleans, vectors, and "
                "arrays of numbers. Convert it before"
            )


def _innermost(kind: Any) -> Any:
    while isinstance(kind, types.ArrayType):
        kind = kind.elementType
    return kind


def written(df: Any, columns: Sequence[str], compress_sparse: bool) -> Any:
    """Returns a DataFrame of some columns in the form in which they are written."""
    return df.select([_converted(df, name, compress_sparse).alias(name) for name in columns])


def _converted(df: Any, name: str, compress_sparse: bool) -> Any:
    column = df[name]
    if not isinstance(df.schema[name].dataType, (VectorUDT, OldVectorUDT)):
        return column
    if compress_sparse:
        # Of a lambda Spark does not try to read type hints.
        return sql.udf(lambda vector: _compressed(vector), _SPARSE)(column)  # noqa: PLW0108 -- see above
    return array_of_vector(column)


def array_of_vector(column: Any) -> Any:
    """Returns a column of vectors as one of arrays. A null stays null: Spark's own function fails at it."""
    return sql.when(column.isNotNull(), pyspark.ml.functions.vector_to_array(column))


def _compressed(vector: Any) -> Any:
    """The struct of a vector, in a task of Spark."""
    if vector is None:
        return None
    values = vector.toArray()
    indices = values.nonzero()[0]
    return len(values), [int(each) for each in indices], [float(each) for each in values[indices]]


def check_written(df: Any, path: str) -> int:
    """Returns the number of rows of a written data set.

    Raises ValueError with the column's name for null values, null elements, and rows of different lengths.
    """
    wanted = [sql.count(sql.lit(1)).alias("rows")]
    for index, field in enumerate(df.schema.fields):
        wanted += _measures(index, sql.col(f"`{field.name}`"), field.dataType)
    found = df.agg(*wanted).collect()[0].asDict()
    for index, field in enumerate(df.schema.fields):
        _judge(field.name, index, found, path)
    return int(found["rows"])


def _measures(index: int, column: Any, kind: Any) -> list[Any]:
    """Sums and limits that show whether a column can be read as an array."""
    # `sum` of no rows is null.
    measures = [sql.coalesce(sql.sum(column.isNull().cast("long")), sql.lit(0)).alias(f"nulls{index}")]
    if isinstance(kind, types.StructType):
        kind, column = types.IntegerType(), column[SPARSE_FIELDS[0]]
        measures += [sql.min(column).alias(f"min{index}_0"), sql.max(column).alias(f"max{index}_0")]
    depth = 0
    while isinstance(kind, types.ArrayType):
        measures += [sql.min(sql.size(column)).alias(f"min{index}_{depth}")]
        measures += [sql.max(sql.size(column)).alias(f"max{index}_{depth}")]
        inside = sql.exists(column, lambda element: element.isNull()).cast("long")
        measures += [sql.coalesce(sql.sum(inside), sql.lit(0)).alias(f"inside{index}_{depth}")]
        kind, depth = kind.elementType, depth + 1
        if isinstance(kind, types.ArrayType):
            # Readers check the lists inside: their number is not that of the rows.
            break
    return measures


def _judge(name: str, index: int, found: dict[str, Any], path: str) -> None:
    rows = found["rows"]
    if nulls := found[f"nulls{index}"]:
        raise ValueError(
            f"column {name!r} has {nulls} null values in {rows} rows; a model cannot train on them: fill or drop these "
            "rows (DataFrame.na)"
        )
    if inside := found.get(f"inside{index}_0"):
        raise ValueError(f"column {name!r} has arrays with null elements in {inside} of {rows} rows; fill them before")
    shortest, longest = found.get(f"min{index}_0"), found.get(f"max{index}_0")
    if shortest != longest:
        raise ValueError(
            f"column {name!r} is ragged: its rows have from {shortest} to {longest} elements. All rows of a column "
            f"need the same shape: pad or cut them. (The data set is {path})"
        )


def check_validation(validation: Any, df: Any = None) -> None:
    """Raises ValueError for a share that is not in [0, 1), a column that is no number or boolean or that is missing.

    validation -- None, a share of the rows, or the name of a column
    """
    if validation is None:
        return
    if isinstance(validation, bool) or not isinstance(validation, (int, float, str)):
        raise ValueError(f"validation is {validation!r}; it must be a share from 0 to below 1, or the name of a column")
    if not isinstance(validation, str):
        if not 0 <= validation < 1:
            raise ValueError(f"validation is {validation}; as a share of the rows it is at least 0 and below 1")
        return
    if df is None:
        return
    check_present(df, [validation], "the validation column")
    kind = df.schema[validation].dataType
    if not isinstance(kind, _NUMBERS):
        raise ValueError(
            f"the validation column {validation!r} has the type {kind.simpleString()}; it is boolean, or a number that "
            "is above 0 in rows for validation"
        )


def check_numbers(df: Any, columns: Iterable[str]) -> None:
    """Raises ValueError with the name of a column of text or bytes, which needs a transformation function."""
    for name in columns:
        if name in df.columns and isinstance(df.schema[name].dataType, _OBJECTS):
            raise ValueError(
                f"column {name!r} has the type {df.schema[name].dataType.simpleString()}, which is no input of a "
                "model; encode it before, or give transformation_fn"
            )


def check_predictable(df: Any, columns: Iterable[str]) -> None:
    """Raises ValueError with the name of a column of text or bytes: `transform` does not call `transformation_fn`."""
    for name in columns:
        if name in df.columns and isinstance(_innermost(df.schema[name].dataType), _OBJECTS):
            raise ValueError(
                f"column {name!r} has the type {df.schema[name].dataType.simpleString()}, which is no input of a "
                "model, and transform does not call transformation_fn. Encode the column as numbers before fit and "
                "before transform, or predict with getModel() yourself"
            )
