"""Columns of a batch as tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch

from ronde.spark.common.task import column_of, shape_of_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Batch(NamedTuple):
    """A batch: the model's inputs, labels, and the weights of its rows or None. Each tensor has the rows first."""

    inputs: list[torch.Tensor]
    labels: list[torch.Tensor]
    weights: torch.Tensor | None

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return len(self.labels[0])


class Shapes(NamedTuple):
    """How columns become tensors.

    features, labels, weight -- names of columns
    inputs       -- the shape of a row of each feature, or of a batch with -1 first; default: as the column is
    label_shapes -- the same of labels
    categorical  -- features that stay whole numbers
    """

    features: Sequence[str]
    labels: Sequence[str]
    weight: str | None = None
    inputs: Sequence[Any] | None = None
    label_shapes: Sequence[Any] | None = None
    categorical: Sequence[str] = ()

    def batch(self, columns: Mapping[str, Any], device: Any = None) -> Batch:
        """Returns the tensors of a batch. Raises ValueError if a column does not have the given shape."""
        labels = []
        for index, name in enumerate(self.labels):
            tensor = label_of(column_of(columns, name))
            labels.append(shaped(name, tensor, self.label_shapes, index).to(device))
        weights = None
        if self.weight:
            weights = float_of(column_of(columns, self.weight)).reshape(-1).to(device)
        return Batch(self.tensors(columns, device), labels, weights)

    def tensors(self, columns: Mapping[str, Any], device: Any = None) -> list[torch.Tensor]:
        """Returns the model's inputs."""
        inputs = []
        for index, name in enumerate(self.features):
            given = column_of(columns, name)
            tensor = tensor_of(given).long() if name in self.categorical else float_of(given)
            inputs.append(shaped(name, tensor, self.inputs, index).to(device))
        return inputs


def tensor_of(array: Any) -> torch.Tensor:
    """Returns an array as a tensor that shares its memory where that is writable."""
    if isinstance(array, torch.Tensor):
        return array
    array = numpy.ascontiguousarray(array)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def float_of(array: Any) -> torch.Tensor:
    """Returns an array as PyTorch's default floating-point type, float32 unless the program changed it."""
    return tensor_of(array).to(torch.get_default_dtype())


def label_of(array: Any) -> torch.Tensor:
    """Returns a label: int64 for whole numbers and booleans, else the default floating-point type."""
    tensor = tensor_of(array)
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor.long()


def shaped(name: str, tensor: torch.Tensor, shapes: Sequence[Any] | None, index: int) -> torch.Tensor:
    """Returns a tensor with the shape that is given for its column, if any."""
    if not shapes or shapes[index] is None:
        return tensor
    shape = shape_of_rows(shapes[index], len(tensor))
    known = math.prod(each for each in shape if each != -1)
    if tensor.numel() % max(known, 1) or (-1 not in shape and known != tensor.numel()):
        raise ValueError(
            f"column {name!r} has {tensor.numel() // max(len(tensor), 1)} values a row, not {shapes[index]}"
        )
    reshaped = tensor.reshape(shape)
    if len(reshaped) != len(tensor):
        raise ValueError(f"column {name!r} has {tensor.numel() // len(tensor)} values a row, not {shapes[index]}")
    return reshaped


def as_outputs(given: Any) -> list[torch.Tensor]:
    """Returns a model's outputs as a list."""
    return list(given) if isinstance(given, (list, tuple)) else [given]


def matched(outputs: Any, labels: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns outputs as a list, and labels in the shape of their outputs where they have as many values.

    So a column of numbers and an output of one value for each row are not broadcast to a matrix, and labels of the
    loss have the type of their outputs. Raises ValueError if there is not one output for each label.
    """
    listed = as_outputs(outputs)
    if len(listed) != len(labels):
        raise ValueError(f"the model has {len(listed)} outputs for {len(labels)} label_cols; give one for each")
    same = []
    for output, label in zip(listed, labels):
        is_same = output.numel() == label.numel() and output.is_floating_point()
        same.append(label.reshape(output.shape).to(output.dtype) if is_same else label)
    return listed, same
