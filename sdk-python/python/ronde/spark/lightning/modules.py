"""Models for Lightning's Trainer: the program's LightningModule, or one around a module of PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import lightning
import torch

from ronde.spark.torch import losses
from ronde.spark.torch.batches import as_outputs, matched

if TYPE_CHECKING:
    from collections.abc import Sequence


class WrappedModule(lightning.LightningModule):  # type: ignore[misc]
    """A LightningModule for a module of PyTorch, its optimizer and its losses.

    model     -- takes the features
    optimizer -- of its parameters
    loss      -- the losses of its outputs
    metrics   -- functions of (output, label), a list for each label
    features, labels, weight -- the columns of a batch
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: losses.Losses,
        metrics: list[list[Any]],
        features: Sequence[str],
        labels: Sequence[str],
        weight: str | None,
    ) -> None:
        super().__init__()
        self.wrapped = model
        self._made, self._losses, self._metric_functions = optimizer, loss, metrics
        # Lightning moves them to the device with the model.
        self._moved = torch.nn.ModuleList([*loss.modules(), *losses.modules_of(metrics)])
        self._features, self._labels, self._weight = list(features), list(labels), weight

    def forward(self, *inputs: torch.Tensor) -> Any:
        """Returns the model's outputs."""
        return self.wrapped(*inputs)

    def _step(self, batch: dict[str, torch.Tensor], prefix: str) -> torch.Tensor:
        labels = [batch[name] for name in self._labels]
        outputs, labels = matched(self(*[batch[name] for name in self._features]), labels)
        loss = self._losses(outputs, labels, batch[self._weight] if self._weight else None)
        settings = {"on_step": False, "on_epoch": True, "batch_size": len(labels[0])}
        self.log(f"{prefix}loss", loss.detach(), **settings)
        for name, functions, output, label in zip(self._labels, self._metric_functions, as_outputs(outputs), labels):
            for index, function in enumerate(functions):
                value = torch.as_tensor(function(output.detach(), label)).double().mean()
                self.log(f"{prefix}{name}_{losses.name_of(function, index)}", value, **settings)
        return loss

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """Returns the loss of a batch."""
        del index
        return self._step(batch, "")

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        """Logs loss and metrics of a batch, as `val_loss` and so on."""
        del index
        self._step(batch, "val_")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return self._made


def inner(model: Any) -> Any:
    """Returns the program's module."""
    return model.wrapped if isinstance(model, WrappedModule) else model
