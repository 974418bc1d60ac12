"""Batch normalization with the statistics of all ranks' batches together."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from ronde.frameworks import basics
from ronde.frameworks.process_sets import global_process_set
from ronde.ops import Sum
from ronde.torch import gradients


class SyncBatchNorm(_BatchNorm):
    """`torch.nn.BatchNorm*d` whose mean and variance in training are those of all ranks' batches together.

    The arguments are those of `torch.nn.BatchNorm1d`. Input is of shape (rows, num_features, ...), on any device, of
    float16, bfloat16, float32 or float64; the number of rows may differ between ranks, and be 0 on some of them.

    All ranks must call it equally often. In evaluation with running statistics, and on a single rank, it is plain batch
    normalization and sends nothing. Without running statistics (`track_running_stats=False`) it uses those of all
    ranks' batches in evaluation, too, as Horovod does, so all ranks must evaluate equally often. It is twice
    differentiable.

    Raises ValueError for input with fewer than two dimensions, and what `ronde.torch.allreduce` does.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-05,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns the normalized input, of the same type and shape."""
        self._check_input_dim(input)
        is_of_batch = self.training or self.running_mean is None
        if not is_of_batch or basics.size() == 1:
            return super().forward(input)
        normalized, mean, variance, count = _SyncBatchNorm.apply(input, self.weight, self.bias, self.eps)
        if self.training and self.track_running_stats:
            self._track(mean, variance, count)
        result: torch.Tensor = normalized
        return result

    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _SyncBatchNorm(torch.autograd.Function):
    """The normalization. It combines statistics as Chan, Golub and LeVeque (1979), in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: Any, bias: Any, eps: float) -> Any:
        wide = given.to(_wide(given.dtype))
        count, mean, variance = _together(wide)
        inverse = torch.rsqrt(variance + eps)
        normalized = (wide - _channels(mean, wide)) * _channels(inverse, wide)
        if weight is not None:
            normalized = normalized * _channels(weight.to(wide.dtype), wide)
        if bias is not None:
            normalized = normalized + _channels(bias.to(wide.dtype), wide)
        ctx.eps = eps
        ctx.save_for_backward(given, weight, bias, mean, inverse, count)
        ctx.mark_non_differentiable(mean, variance, count)
        return normalized.to(given.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        given, weight, bias, mean, inverse, count = ctx.saved_tensors
        wide = given.to(_wide(given.dtype))
        if torch.is_grad_enabled():
            # The code below may be differentiated again, and statistics depend on the input.
            mean, inverse = _differentiable_statistics(wide, count, ctx.eps)
        gradient, centred = upstream[0].to(wide.dtype), wide - _channels(mean, wide)
        over = _over(wide)
        # From this rank's rows: the gradients of weight and bias, which are averaged like all others.
        sum_gradient, sum_product = gradient.sum(dim=over), (gradient * centred).sum(dim=over)
        bias_gradient = None if bias is None else sum_gradient.to(bias.dtype)
        weight_gradient = None if weight is None else (sum_product * inverse).to(weight.dtype)
        # From all ranks' rows: the part of the input's gradient through the statistics. Each rank multiplies by its
        # own weight before the sum, as derivatives by one rank's weight are not those by another's.
        sums = torch.stack([sum_gradient, sum_product])
        if weight is not None:
            sums, gradient = sums * weight.to(sums.dtype), gradient * _channels(weight.to(gradient.dtype), gradient)
        sums = _summed(sums, "sync_batch_norm.backward") / count
        shared = _channels(sums[0], gradient) + centred * _channels(inverse.square() * sums[1], gradient)
        input_gradient = (gradient - shared) * _channels(inverse, gradient)
        return input_gradient.to(upstream[0].dtype), weight_gradient, bias_gradient, None


def _differentiable_statistics(
    wide: torch.Tensor, count: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns mean and inverse standard deviation over all ranks, as functions of the input."""
    mean = _summed(wide.sum(dim=_over(wide)), "sync_batch_norm.mean") / count
    squares = (wide - _channels(mean, wide)).square().sum(dim=_over(wide))
    return mean, torch.rsqrt(_summed(squares, "sync_batch_norm.variance") / count + eps)


def _summed(values: torch.Tensor, name: str) -> torch.Tensor:
    result: torch.Tensor = gradients.AllReduce.apply(values, name, Sum, 1.0, 1.0, global_process_set, None)
    return result


def _over(wide: torch.Tensor) -> list[int]:
    """Returns the dimensions that statistics reduce: all but the channels'."""
    return [dimension for dimension in range(wide.dim()) if dimension != 1]


def _together(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns elements of each channel, mean and biased variance, over all ranks."""
    channels = wide.shape[1]
    elements = wide.numel() // channels if channels else 0
    if elements:
        variance, mean = torch.var_mean(wide, dim=_over(wide), correction=0)
    else:
        variance = mean = wide.new_zeros(channels)
    mine = torch.cat([mean, variance, wide.new_full((1,), float(elements))]).reshape(1, -1)
    everybodys = gradients.gathered(mine, "sync_batch_norm.forward", global_process_set)
    means, variances, counts = everybodys[:, :channels], everybodys[:, channels:-1], everybodys[:, -1:]
    count = counts.sum()
    shares = counts / count.clamp(min=1)
    mean = (means * shares).sum(dim=0)
    variance = ((variances + (means - mean).square()) * shares).sum(dim=0)
    return count, mean, variance


def _channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.reshape(1, -1, *[1] * (like.dim() - 2))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
