"""Losses and metrics of models with one or more outputs."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any, Callable

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

Tensor = torch.Tensor


class Losses:
    """The weighted sum of the losses of a model's outputs.

    functions -- functions or modules of (output, label); as many as there are outputs
    weights   -- their weights; default: equal ones, with the sum 1

    With weights of rows, functions are called with `reduction="none"`, and of modules with that setting the mean over
    the batch of `weight * loss` is taken.
    """

    def __init__(self, functions: Sequence[Any], weights: Sequence[float] | None) -> None:
        self._functions = list(functions)
        self._weights = list(weights) if weights is not None else [1.0 / len(self._functions)] * len(self._functions)
        self._by_rows = [_by_rows(function) for function in self._functions]

    def modules(self) -> list[torch.nn.Module]:
        """Returns the losses that are modules, which may have tensors, such as the weights of classes."""
        return [each for each in (*self._functions, *self._by_rows) if isinstance(each, torch.nn.Module)]

    def to(self, device: Any) -> Losses:
        """Moves the tensors of modules to a device. Returns this object."""
        for module in self.modules():
            module.to(device)
        return self

    def __call__(self, outputs: Sequence[Tensor], labels: Sequence[Tensor], rows: Tensor | None = None) -> Tensor:
        """Returns the loss of a batch.

        outputs, labels -- one of each for each function
        rows            -- weights of the rows, or None
        """
        total: Any = 0.0
        functions = self._functions if rows is None else self._by_rows
        for weight, function, output, label in zip(self._weights, functions, outputs, labels):
            loss = function(output, label)
            if rows is not None:
                if loss.dim() == 0 or loss.shape[0] != rows.shape[0]:
                    raise ValueError(
                        "with sample_weight_col, each loss must return one value for each row where it is given "
                        f"reduction='none', but {function} returned the shape {list(loss.shape)}"
                    )
                loss = (loss.reshape(rows.shape[0], -1).mean(1) * rows).mean()
            total = total + weight * loss
        checked: Tensor = total
        return checked


def _by_rows(function: Any) -> Callable[..., Tensor]:
    """The loss of each row."""
    if isinstance(function, torch.nn.Module):
        changed = copy.copy(function)
        changed.reduction = "none"  # type: ignore[assignment]
        return changed
    return lambda output, label: function(output, label, reduction="none")


def functions_of(loss: Any, loss_constructors: Any, labels: int) -> list[Any]:
    """Returns one loss function for each label.

    loss              -- a function or module, or a list of them; one is for all labels
    loss_constructors -- instead: functions that return them

    Raises ValueError if both or none are given, and for another number of them.
    """
    if loss is not None and loss_constructors is not None:
        raise ValueError("only one of loss and loss_constructors may be given")
    if loss is None and loss_constructors is None:
        raise ValueError("loss is not set; give loss or loss_constructors")
    given = loss if loss is not None else loss_constructors
    listed = list(given) if isinstance(given, (list, tuple)) else [given]
    if len(listed) == 1:
        listed *= labels
    if len(listed) != labels:
        raise ValueError(f"there are {len(listed)} losses for {labels} label_cols; give one, or one for each")
    return listed if loss is not None else [constructor() for constructor in listed]


def metrics_of(metrics: Any, labels: int) -> list[list[Any]]:
    """Returns the metrics of each label. Raises ValueError for another number of lists than labels.

    metrics -- functions of (output, label) for all labels, or one list of them for each label
    """
    listed = list(metrics or [])
    if not any(isinstance(each, (list, tuple)) for each in listed):
        return [listed] * labels
    if len(listed) != labels:
        raise ValueError(f"metrics has {len(listed)} lists for {labels} label_cols; give one for each")
    return [list(each) if isinstance(each, (list, tuple)) else [each] for each in listed]


def modules_of(metrics: list[list[Any]]) -> list[torch.nn.Module]:
    """Returns the metrics that are modules, which may have tensors."""
    return [each for each in itertools.chain.from_iterable(metrics) if isinstance(each, torch.nn.Module)]


def name_of(metric: Any, index: int) -> str:
    """Returns the name of a metric in the history."""
    name = getattr(metric, "__name__", type(metric).__name__)
    return f"metric{index}" if name == "<lambda>" else str(name)
