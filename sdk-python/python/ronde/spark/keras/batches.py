"""Columns of a batch as Keras takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy

from ronde.spark.common.task import column_of, shape_of_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence


def inputs_of(columns: Any, features: Sequence[str], shapes: Sequence[Any]) -> Any:
    """Returns the inputs of a batch: one array, or a tuple of arrays.

    shapes -- the shape of a row of each feature, or None: as the column is. `shapes_of` gives them
    """
    arrays = [_array(column_of(columns, name), shape, name) for name, shape in zip(features, shapes)]
    return arrays[0] if len(arrays) == 1 else tuple(arrays)


def batch_of(
    columns: Any,
    features: Sequence[str],
    shapes: Sequence[Any],
    labels: Sequence[str],
    label_shapes: Sequence[Any] | None,
    weight: str | None,
) -> tuple[Any, ...]:
    """Returns inputs, labels and, with the column `weight`, weights of the rows, as `fit` of Keras takes them."""
    inputs = inputs_of(columns, features, shapes)
    shaped = label_shapes or [None] * len(labels)
    targets = tuple(_array(column_of(columns, name), shape, name) for name, shape in zip(labels, shaped))
    target = targets[0] if len(targets) == 1 else targets
    if weight is None:
        return inputs, target
    rows = _array(column_of(columns, weight), None, weight).astype(keras.config.floatx()).reshape(-1)
    return inputs, target, rows if len(targets) == 1 else (rows,) * len(targets)


def endless(loader: Iterable[Any], convert: Any) -> Iterator[Any]:
    """Returns the batches of pass after pass. Raises ValueError for a loader without batches."""
    while True:
        count = 0
        for columns in loader:
            count += 1
            yield convert(columns)
        if count == 0:
            raise ValueError("the data module gave no batches")


def shapes_of(model: Any, count: int) -> list[Any]:
    """Returns the shape of a row of each input of a model, or None where the model does not fix it.

    Raises ValueError for a model with another number of inputs than `count`.
    """
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return [None] * count
    if len(inputs) != count:
        raise ValueError(f"the model has {len(inputs)} inputs for {count} feature_cols; give one column for each")
    shapes = [tuple(each.shape[1:]) for each in inputs]
    return [None if None in shape else shape for shape in shapes]


def _array(given: Any, shape: Any, name: str) -> Any:
    array = numpy.asarray(given)
    if array.dtype.kind == "f":
        array = array.astype(keras.config.floatx(), copy=False)
    elif array.dtype.kind == "b":
        array = array.astype("int32")
    if shape is None:
        return array
    try:
        reshaped = array.reshape(shape_of_rows(shape, len(array)))
    except ValueError as error:
        raise ValueError(f"column {name!r} has {array[0].size} values a row, not the shape {shape}") from error
    if len(reshaped) != len(array):
        raise ValueError(f"column {name!r} has {array[0].size} values a row, not the shape {shape}")
    return reshaped
