"""What happens to a gradient before it is handed over, and after the result is back; or on its way between sidecars."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ronde.ops import Average, Sum
from ronde.plugins import Plugin, PluginOp


class Compressor(Protocol):
    """A pair of functions around a reduction."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to reduce, and what `decompress` needs to know."""
        ...

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The result as the caller wants it."""
        ...


class NoneCompressor:
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor itself."""
        del ctx
        return tensor


class _Cast:
    """Reduces floating-point tensors in another type."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor in the other type, if it has floating-point elements."""
        if not tensor.dtype.is_floating_point:
            return tensor, tensor.dtype
        return tensor.to(cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The tensor in its original type."""
        dtype: torch.dtype = ctx
        return tensor.to(dtype)


class FP16Compressor(_Cast):
    """Reduces floating-point tensors in half precision, to which sums are rounded between sidecars."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """Reduces floating-point tensors in bfloat16, which has the range of float32 and to which sums are rounded."""

    dtype = torch.bfloat16


class PluginCompressor(NoneCompressor):
    """Leaves tensors as they are: a plugin encodes them in the sidecar. Made by `Compression.plugin`."""

    def __init__(self, codec: Plugin) -> None:
        self.codec = codec

    def __repr__(self) -> str:
        return f"Compression.plugin{repr(self.codec)[len('Plugin') :]}"


class Compression:
    """The compressors. Any class with these two functions is one, also if it changes the shape."""

    none: type[Compressor] = NoneCompressor
    fp16: type[Compressor] = FP16Compressor
    bf16: type[Compressor] = BF16Compressor

    @staticmethod
    def plugin(name: str, /, **parameters: Any) -> PluginCompressor:
        """A plugin that is a codec, for all-reduces with Average and Sum: `Compression.plugin("topk", ratio=0.01)`.

        name, parameters -- as for `ronde.Plugin`

        Tensors stay as they are, also their type, which has to be one that the plugin takes; they are encoded on the
        way between sidecars. All ranks end with the same bits. A codec with error feedback keeps what it has left out
        of a tensor by its name and adds it the next time, so `allreduce` is to be given a name; the distributed
        optimizer names all gradients, those of the n-th optimizer `optimizer.n.NAME`, from 0 on.

        Raises ValueError as `ronde.Plugin` does.
        """
        return PluginCompressor(Plugin(name, **parameters))


def codec_of(compression: type[Compressor] | PluginCompressor, op: int | PluginOp) -> Plugin | None:
    """The plugin that encodes, where the compression is one. Raises ValueError with a reduction that it is not for."""
    if not isinstance(compression, PluginCompressor):
        return None
    if op not in (Average, Sum):
        raise ValueError(
            f"{compression} is for op=Average and op=Sum, as what it decodes is summed; use Compression.none"
        )
    return compression.codec


def keeps_results(compression: type[Compressor] | PluginCompressor) -> bool:
    """Whether what the compressor has left as it is needs nothing done to its result."""
    return compression.decompress in (NoneCompressor.decompress, _Cast.decompress)


def check_no_plugin(compression: type[Compressor] | PluginCompressor, operation: str) -> None:
    """Raises ValueError where the compression is a plugin."""
    if isinstance(compression, PluginCompressor):
        raise ValueError(f"{operation} takes no plugin, but was given {compression}; only allreduce does")
