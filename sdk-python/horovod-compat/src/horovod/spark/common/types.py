"""Names of data types of Spark, NumPy and Arrow, and which corresponds to which, as Horovod's helpers have them."""

from __future__ import annotations

from typing import Any

import numpy
import pyarrow
from pyspark.ml.linalg import DenseVector, SparseVector, VectorUDT
from pyspark.sql import types
from pyspark.sql.pandas.types import from_arrow_type

__all__ = [
    "data_type_to_numpy",
    "data_type_to_str",
    "numpy_type_to_str",
    "pyarrow_to_spark_data_type",
    "spark_scalar_to_python_type",
]

_VECTORS = (VectorUDT, SparseVector, DenseVector)
# A type of Spark: its name, its type in Python, and that of NumPy.
_SCALARS: dict[type, tuple[str, type, Any]] = {
    types.IntegerType: ("Int", int, numpy.int32),
    types.LongType: ("Long", int, numpy.int64),
    types.FloatType: ("Float", float, numpy.float32),
    types.DoubleType: ("Double", float, numpy.float64),
    types.BooleanType: ("Boolean", bool, numpy.bool_),
    types.StringType: ("String", str, numpy.str_),
    types.BinaryType: ("Binary", bytes, numpy.uint8),
}


def _class_of(dtype: Any) -> type:
    return dtype if isinstance(dtype, type) else type(dtype)


def _unknown(dtype: Any) -> ValueError:
    return ValueError(f"Unrecognized data type: {dtype}; known are numbers, booleans, strings, bytes and vectors")


def _scalar(dtype: Any) -> tuple[str, type, Any]:
    found = _SCALARS.get(_class_of(dtype))
    if found is None:
        raise _unknown(dtype)
    return found


def data_type_to_str(dtype: Any) -> str:
    """Returns the name of a type of Spark, such as "Double" or "Vector". Raises ValueError for one without a name."""
    return "Vector" if _class_of(dtype) in _VECTORS else _scalar(dtype)[0]


def numpy_type_to_str(dtype: Any) -> str:
    """Returns the name of the type of Spark for one of NumPy. Raises ValueError if there is none."""
    for name, _, kind in _SCALARS.values():
        if numpy.dtype(dtype) == numpy.dtype(kind):
            return name
    raise _unknown(dtype)


def spark_scalar_to_python_type(dtype: Any) -> type:
    """Returns Python's type for one of Spark. Raises ValueError for one that is no scalar."""
    return _scalar(dtype)[1]


def data_type_to_numpy(dtype: Any) -> Any:
    """Returns NumPy's type for one of Spark, of the elements for vectors and arrays. Raises ValueError for others."""
    if _class_of(dtype) in (*_VECTORS, types.ArrayType):
        return numpy.float64
    return _scalar(dtype)[2]


def pyarrow_to_spark_data_type(dtype: Any) -> type:
    """Returns the class of Spark's type for one of Arrow; DenseVector for lists."""
    return DenseVector if pyarrow.types.is_list(dtype) else type(from_arrow_type(dtype))
