"""Rows of zeros in the types and shapes of feature columns, for which a model shows the sizes of its outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_DTYPE = "float64"


def example_of(
    features: Sequence[str],
    metadata: Mapping[str, Any] | None,
    input_shapes: Sequence[Any] | None,
    df: Any = None,
    rows: int = 2,
) -> dict[str, Any]:
    """Returns an array of zeros for each feature, with `rows` rows.

    metadata     -- {name: {"dtype": "float64", "shape": [2]}}, or None. A shape may also be the number of values, as in
                    Horovod's metadata, and None for one that varies; a type that is missing is float64
    input_shapes -- for a column without metadata: the shape of a row of each feature, or of a batch with -1 or None
                    first
    df           -- a DataFrame of Spark, whose first row has the shapes of the other columns

    Raises ValueError with the names of the columns whose shape none of these has.
    """
    described = metadata or {}
    known = {name: _described(described[name]) for name in features if name in described}
    for name, given in zip(features, input_shapes or ()):
        if known.get(name) is None:
            known[name] = _of_row(given)
    unknown = [name for name in features if known.get(name) is None]
    if unknown and df is not None:
        known.update(_of_frame(df, unknown))
        unknown = [name for name in unknown if known.get(name) is None]
    if unknown:
        raise ValueError(
            f"the shape of the feature column {', '.join(map(repr, unknown))} is not known: the model has no _metadata "
            "of it, and the DataFrame has no first row with a value. Give the constructor "
            f'_metadata={{{unknown[0]!r}: {{"dtype": "float64", "shape": [...]}}, ...}}, or input_shapes'
        )
    found = [known[name] for name in features]
    return {name: numpy.zeros((rows, *each[0]), each[1]) for name, each in zip(features, found) if each is not None}


def _described(column: Mapping[str, Any]) -> tuple[list[int], str] | None:
    shape = column.get("shape")
    if shape is None:
        return None
    if isinstance(shape, (int, numpy.integer)):
        shape = [] if shape == 1 else [int(shape)]
    return list(shape), column.get("dtype") or _DTYPE


def _of_row(given: Any) -> tuple[list[int], str] | None:
    """The shape of a row, from that of a row or of a batch; None if it is not fixed."""
    if given is None:
        return None
    shape = [-1 if each is None else int(each) for each in given]
    inner = shape[1:] if shape[:1] == [-1] else shape
    return None if -1 in inner else (inner, _DTYPE)


def _of_frame(df: Any, names: list[str]) -> dict[str, tuple[list[int], str] | None]:
    """Shapes and types of the values in the first row of a DataFrame."""
    first = df.select(names).head(1)
    return {name: _of_value(first[0][name]) for name in names} if first else {}


def _of_value(value: Any) -> tuple[list[int], str] | None:
    if value is None:
        return None
    array = numpy.asarray(value.toArray() if hasattr(value, "toArray") else value)
    # Decimals are doubles, and an array with a null is reported by the job.
    return list(array.shape), _DTYPE if array.dtype == object else str(array.dtype)
