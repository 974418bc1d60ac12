"""The models of measured training steps, in plain PyTorch."""

from __future__ import annotations

import dataclasses
from typing import Callable

from torch import nn

from ronde.bench import image_models


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model, the shape of one sample, and the number of classes."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int


def mlp() -> nn.Module:
    """Returns a perceptron of 25 million parameters, 101 MB of gradients: much communication for its computation."""
    return nn.Sequential(
        nn.Linear(1024, 3072),
        nn.ReLU(),
        nn.Linear(3072, 3072),
        nn.ReLU(),
        nn.Linear(3072, 3072),
        nn.ReLU(),
        nn.Linear(3072, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )


def cnn() -> nn.Module:
    """Returns a small convolutional network of 0.5 million parameters for images of 32 by 32: little communication."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(4),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


KINDS = {
    "mlp": Kind(mlp, (1024,), 10),
    "cnn": Kind(cnn, (3, 32, 32), 10),
    "resnet50": Kind(image_models.resnet50, (3, 224, 224), 1000),
    "resnet101": Kind(image_models.resnet101, (3, 112, 112), 1000),
    "vgg16": Kind(image_models.vgg16, (3, 32, 32), 1000),
    "inception3": Kind(image_models.inception3, (3, 128, 128), 1000),
}
