"""Models for images that are known from benchmarks, in plain PyTorch; some for smaller images than in their papers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Union

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence

Size = Union[int, "tuple[int, int]"]


def resnet50() -> nn.Module:
    """Returns ResNet-50 of He et al., 2015, with the stride in the 3 by 3 convolutions: 25.6 million parameters."""
    return _resnet((3, 4, 6, 3))


def resnet101() -> nn.Module:
    """Returns ResNet-101 of the same work: 44.5 million parameters."""
    return _resnet((3, 4, 23, 3))


def vgg16() -> nn.Module:
    """Returns VGG-16 of Simonyan and Zisserman, 2014, for images of 32 by 32: 37.7 million parameters.

    For 224 by 224 its first linear layer has 102.8 million parameters instead of 2.1 million. Without dropout, so that
    steps can be compared.
    """
    layers: list[nn.Module] = []
    width = 3
    for channels, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(width, channels, 3, padding=1), nn.ReLU(inplace=True)]
            width = channels
        layers.append(nn.MaxPool2d(2))
    layers += [
        nn.Flatten(),
        nn.Linear(width, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
    ]
    return nn.Sequential(*layers, nn.Linear(4096, 1000))


def inception3() -> nn.Module:
    """Returns Inception V3 of Szegedy et al., 2015, without the auxiliary classifier: 23.8 million parameters.

    Images have at least 75 by 75 pixels; 299 by 299 in the work. Without dropout, so that steps can be compared.
    """
    stem = [_unit(3, 32, 3, 2, 0), _unit(32, 32, 3, 1, 0), _unit(32, 64, 3), nn.MaxPool2d(3, 2)]
    stem += [_unit(64, 80, 1), _unit(80, 192, 3, 1, 0), nn.MaxPool2d(3, 2)]
    blocks = [_small(192, 32), _small(256, 64), _small(288, 64), _first_reduction(288)]
    blocks += [_long(768, channels) for channels in (128, 160, 160, 192)]
    blocks += [_second_reduction(768), _wide(1280), _wide(2048)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def _resnet(depths: Sequence[int]) -> nn.Module:
    stem = [*_convolution(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    width, blocks = 64, []
    for stage, (channels, depth) in enumerate(zip((64, 128, 256, 512), depths)):
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


class _Branches(nn.Module):
    """Applies modules to the same images, and concatenates the channels of their results."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Computes the block."""
        return torch.cat([branch(images) for branch in self.branches], 1)


def _unit(width: int, channels: int, kernel: Size, stride: int = 1, padding: Size | None = None) -> nn.Module:
    """Returns convolution, normalization and ReLU; without `padding` the size of the images stays."""
    if padding is None:
        padding = kernel // 2 if isinstance(kernel, int) else (kernel[0] // 2, kernel[1] // 2)
    convolution = nn.Conv2d(width, channels, kernel, stride, padding, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(channels, eps=1e-3), nn.ReLU(inplace=True))


def _pooled(width: int, channels: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), _unit(width, channels, 1))


def _small(width: int, pooled: int) -> nn.Module:
    return _Branches(
        _unit(width, 64, 1),
        nn.Sequential(_unit(width, 48, 1), _unit(48, 64, 5)),
        nn.Sequential(_unit(width, 64, 1), _unit(64, 96, 3), _unit(96, 96, 3)),
        _pooled(width, pooled),
    )


def _first_reduction(width: int) -> nn.Module:
    double = nn.Sequential(_unit(width, 64, 1), _unit(64, 96, 3), _unit(96, 96, 3, 2, 0))
    return _Branches(_unit(width, 384, 3, 2, 0), double, nn.MaxPool2d(3, 2))


def _long(width: int, channels: int) -> nn.Module:
    row, column = (1, 7), (7, 1)
    once = [_unit(width, channels, 1), _unit(channels, channels, row), _unit(channels, 192, column)]
    twice = [_unit(width, channels, 1), _unit(channels, channels, column), _unit(channels, channels, row)]
    twice += [_unit(channels, channels, column), _unit(channels, 192, row)]
    return _Branches(_unit(width, 192, 1), nn.Sequential(*once), nn.Sequential(*twice), _pooled(width, 192))


def _second_reduction(width: int) -> nn.Module:
    short = nn.Sequential(_unit(width, 192, 1), _unit(192, 320, 3, 2, 0))
    long = [_unit(width, 192, 1), _unit(192, 192, (1, 7)), _unit(192, 192, (7, 1)), _unit(192, 192, 3, 2, 0)]
    return _Branches(short, nn.Sequential(*long), nn.MaxPool2d(3, 2))


def _wide(width: int) -> nn.Module:
    once = nn.Sequential(_unit(width, 384, 1), _crossed())
    twice = nn.Sequential(_unit(width, 448, 1), _unit(448, 384, 3), _crossed())
    return _Branches(_unit(width, 320, 1), once, twice, _pooled(width, 192))


def _crossed() -> nn.Module:
    return _Branches(_unit(384, 384, (1, 3)), _unit(384, 384, (3, 1)))
