"""Compression of gradients, around the submission in this process."""

from __future__ import annotations

from typing import Any

import numpy

from ronde.frameworks.compression import Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor:
    """Reduces float32 and float64 arrays in half precision, to which sums are rounded between sidecars."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the array in half precision, if it has floating-point elements."""
        dtype = numpy.dtype(tensor.dtype)
        is_wide = dtype.kind == "f" and dtype.itemsize > 2
        return tensor.astype("float16") if is_wide else tensor, dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the array in its original type."""
        return tensor.astype(ctx) if numpy.dtype(tensor.dtype) != ctx else tensor


class Compression:
    """The compressors. Any class with `compress` and `decompress` is one, even if it changes the shape."""

    none: type[Compressor] = NoneCompressor
    fp16: type[Compressor] = FP16Compressor
