"""The models of measured training steps, in plain PyTorch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Callable

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence


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


def resnet50() -> nn.Module:
    """Returns ResNet-50 of He et al., 2015, with the stride in the 3 by 3 convolutions: 25.6 million parameters."""
    stem = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    width, blocks = 64, []
    for stage, (channels, depth) in enumerate(zip((64, 128, 256, 512), (3, 4, 6, 3))):
        for index in range(depth):
            blocks.append(_Bottleneck(width, channels, 2 if stage and not index else 1))
            width = channels * _Bottleneck.expansion
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


class _Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, width: int, channels: int, stride: int) -> None:
        super().__init__()
        out = channels * self.expansion
        self.residual = nn.Sequential(
            *_convolution(width, channels, 1, 1),
            nn.ReLU(inplace=True),
            *_convolution(channels, channels, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(channels, out, 1, 1),
        )
        same = stride == 1 and width == out
        self.shortcut = nn.Identity() if same else nn.Sequential(*_convolution(width, out, 1, stride))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Computes the block."""
        return torch.relu(self.residual(images) + self.shortcut(images))


def _convolution(width: int, channels: int, kernel: int, stride: int) -> Sequence[nn.Module]:
    convolution = nn.Conv2d(width, channels, kernel, stride, padding=kernel // 2, bias=False)
    return convolution, nn.BatchNorm2d(channels)


KINDS = {
    "mlp": Kind(mlp, (1024,), 10),
    "cnn": Kind(cnn, (3, 32, 32), 10),
    "resnet50": Kind(resnet50, (3, 224, 224), 1000),
}
