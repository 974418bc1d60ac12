"""`SyncBatchNormalization`: batch normalization over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ronde.frameworks import world
from ronde.frameworks.process_sets import global_process_set
from ronde.ops import Sum
from ronde.tensorflow import mpi_ops
from ronde.tensorflow.reduction import needs_collectives

_Base: Any = tf.keras.layers.BatchNormalization


class SyncBatchNormalization(_Base):
    """`tf.keras.layers.BatchNormalization` with the mean and the variance of the batches of all ranks.

    fused -- False; a fused kernel does not synchronize

    Ranks may have batches of different lengths, and some of them empty ones. If no rank has an element that the mask
    leaves, mean and variance are 0. While training, all ranks must run the layer. Raises ValueError for another
    `fused`.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not support fused=True.")
        super().__init__(**kwargs)
        # tf-keras would choose a fused kernel by itself.
        if hasattr(self, "fused"):
            self.fused = False

    def _moments(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns mean and variance over all ranks; as the base class, with its arguments."""
        mean, variance = super()._moments(inputs, *args, **kwargs)
        if not world.is_begun() or not needs_collectives(global_process_set):
            return mean, variance
        mask = kwargs.get("mask", args[-1] if args and not isinstance(args[-1], bool) else None)
        counts = self._counts(inputs, mean, mask if isinstance(mask, tf.Tensor) else None)
        counts, shape = tf.cast(counts, mean.dtype), tf.shape(mean)
        mean, variance = tf.reshape(mean, [-1]), tf.reshape(variance, [-1])
        # Of an empty batch both are NaN, and so would be the sums and gradients of all ranks.
        mean, variance = (tf.where(counts > 0, each, tf.zeros_like(each)) for each in (mean, variance))
        # The mean first: a difference of large squares would lose the variance.
        sums = tf.concat([mean * counts, counts], 0)
        sums = mpi_ops.allreduce(sums, op=Sum, name="SyncBatchNormalization.mean")
        totals = sums[tf.size(mean) :]
        # Without an element on any rank, as with a mask of zeros, both are 0, as those of the base class.
        everybodys_mean = tf.math.divide_no_nan(sums[: tf.size(mean)], totals)
        spread = (variance + tf.math.squared_difference(mean, everybodys_mean)) * counts
        spread = mpi_ops.allreduce(spread, op=Sum, name="SyncBatchNormalization.variance")
        return tuple(tf.reshape(each, shape) for each in (everybodys_mean, tf.math.divide_no_nan(spread, totals)))

    def _counts(self, inputs: Any, mean: Any, mask: Any) -> Any:
        """Returns how many elements each mean has: one number for all of them, or one for each.

        mask -- None, or which elements count, without the last axis of `inputs`
        """
        sizes = tf.shape(inputs, out_type=tf.int64)
        if mask is None:
            return tf.reshape(elements_of_each(sizes, tf.size(mean, out_type=tf.int64)), [1])
        # tf-keras takes other masks than those of bool as weights.
        weights = tf.cast(mask, tf.int64 if mask.dtype == tf.bool else mean.dtype)
        last = inputs.shape.rank - 1
        kept = {axis % (last + 1) for axis in ([self.axis] if isinstance(self.axis, int) else self.axis)}
        counts = tf.reduce_sum(weights, [axis for axis in range(last) if axis not in kept], keepdims=True)
        counts = counts[..., tf.newaxis]
        if last not in kept:
            counts *= tf.cast(sizes[-1], counts.dtype)
        shape = [sizes[axis] if axis in kept else 1 for axis in range(last + 1)]
        return tf.reshape(tf.broadcast_to(counts, tf.stack(shape)), [-1])

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration of the base class; without `fused`, which has one value only."""
        config: dict[str, Any] = super().get_config()
        config.pop("fused", None)
        return config


def elements_of_each(shape: Any, means: Any) -> Any:
    """Returns how many elements of a batch there are for each mean, as int64.

    shape -- the batch's, an int64 tensor of one dimension: a batch may have 2^31 elements and more
    means -- the number of means, an int64 scalar
    """
    return tf.reduce_prod(shape) // tf.maximum(means, 1)
