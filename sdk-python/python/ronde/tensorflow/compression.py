"""Compression of gradients, around the submission in this process."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ronde.frameworks.compression import Compressor, NoneCompressor

__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class _Cast:
    """Reduces floating-point tensors in another type."""

    dtype: tf.DType

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Returns the tensor in the other type, if it has floating-point elements."""
        if not tensor.dtype.is_floating:
            return tensor, tensor.dtype
        return tf.cast(tensor, cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Returns the tensor in its original type."""
        return tf.cast(tensor, ctx)


class FP16Compressor(_Cast):
    """Reduces floating-point tensors in half precision, to which sums are rounded between sidecars."""

    dtype = tf.float16


class BF16Compressor(_Cast):
    """Reduces floating-point tensors in bfloat16, which has the range of float32 and to which sums are rounded."""

    dtype = tf.bfloat16


class Compression:
    """The compressors. Any class with `compress` and `decompress` is one, even if it changes the shape."""

    none: type[Compressor] = NoneCompressor
    fp16: type[Compressor] = FP16Compressor
    bf16: type[Compressor] = BF16Compressor
