"""What happens to a gradient before it is handed over, and after the result is back."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Compressor(Protocol):
    """A pair of functions around a reduction."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to reduce, and what `decompress` needs to know."""
        ...

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """The result as the caller wants it."""
        ...


class NoneCompressor:
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """The tensor itself."""
        del context
        return tensor


class _Cast:
    """Reduces floating-point tensors in another type; sums are accumulated in float32."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor in the other type, if it has floating-point elements."""
        if not tensor.dtype.is_floating_point:
            return tensor, tensor.dtype
        return tensor.to(cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, context: Any) -> torch.Tensor:
        """The tensor in its original type."""
        dtype: torch.dtype = context
        return tensor.to(dtype)


class FP16Compressor(_Cast):
    """Reduces floating-point tensors in half precision; sums are accumulated in float32."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """Reduces floating-point tensors in bfloat16, which has the range of float32; sums are accumulated in float32."""

    dtype = torch.bfloat16


class Compression:
    """The compressors. Any class with these two functions is one, also if it changes the shape."""

    none: type[Compressor] = NoneCompressor
    fp16: type[Compressor] = FP16Compressor
    bf16: type[Compressor] = BF16Compressor
