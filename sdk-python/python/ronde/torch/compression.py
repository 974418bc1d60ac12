"""Compression of gradients: around the submission in this process, or by a plugin between sidecars."""

from __future__ import annotations

from typing import Any

import torch

from ronde.frameworks.compression import Compressor, NoneCompressor
from ronde.ops import Average, Sum
from ronde.plugins import Plugin, PluginOp

__all__ = [
    "BF16Compressor",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "NoneCompressor",
    "PluginCompressor",
    "check_no_plugin",
    "codec_of",
    "keeps_results",
]


class _Cast:
    """Reduces floating-point tensors in another type."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Returns the tensor in the other type, if it has floating-point elements."""
        if not tensor.dtype.is_floating_point:
            return tensor, tensor.dtype
        return tensor.to(cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Returns the tensor in its original type."""
        dtype: torch.dtype = ctx
        return tensor.to(dtype)


class FP16Compressor(_Cast):
    """Reduces floating-point tensors in half precision, to which sums are rounded between sidecars."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """Reduces floating-point tensors in bfloat16, which has the range of float32 and to which sums are rounded."""

    dtype = torch.bfloat16


class PluginCompressor(NoneCompressor):
    """Leaves tensors as they are; a plugin encodes them in the sidecar. `Compression.plugin` returns one."""

    def __init__(self, codec: Plugin) -> None:
        self.codec = codec

    def __repr__(self) -> str:
        return f"Compression.plugin{repr(self.codec)[len('Plugin') :]}"


class Compression:
    """The compressors. Any class with `compress` and `decompress` is one, even if it changes the shape."""

    none: type[Compressor] = NoneCompressor
    fp16: type[Compressor] = FP16Compressor
    bf16: type[Compressor] = BF16Compressor

    @staticmethod
    def plugin(name: str, /, **parameters: Any) -> PluginCompressor:
        """Returns a codec plugin for all-reduces with Average and Sum: `Compression.plugin("topk", ratio=0.01)`.

        name, parameters -- as for `ronde.Plugin`

        Tensors keep their type, which the plugin must accept. They are encoded only for the transfer between sidecars.
        All ranks get the same bits. A codec with error feedback keeps the residual of a tensor under its name and adds
        it the next time, so give `allreduce` a name. The distributed optimizer names all gradients, those of the n-th
        optimizer `optimizer.n.NAME`, from 0 on.

        Raises ValueError as `ronde.Plugin` does.
        """
        return PluginCompressor(Plugin(name, **parameters))


def codec_of(compression: type[Compressor] | PluginCompressor, op: int | PluginOp) -> Plugin | None:
    """Returns the plugin if the compression is one.

    Raises ValueError for a reduction that excludes codecs, and for what is no compression, such as its name.
    """
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise ValueError(
            f"compression is {compression!r}; give Compression.none, Compression.fp16, Compression.bf16, "
            "Compression.plugin(...) or a class with `compress` and `decompress`"
        )
    if not isinstance(compression, PluginCompressor):
        return None
    if op not in (Average, Sum):
        raise ValueError(
            f"{compression} is for op=Average and op=Sum, as what it decodes is summed; use Compression.none"
        )
    return compression.codec


def keeps_results(compression: type[Compressor] | PluginCompressor) -> bool:
    """Returns whether an unchanged tensor's result needs no decompression by this compressor."""
    return compression.decompress in (NoneCompressor.decompress, _Cast.decompress)


def check_no_plugin(compression: type[Compressor] | PluginCompressor, operation: str) -> None:
    """Raises ValueError if the compression is a plugin."""
    if isinstance(compression, PluginCompressor):
        raise ValueError(f"{operation} takes no plugin, but was given {compression}; only allreduce does")
