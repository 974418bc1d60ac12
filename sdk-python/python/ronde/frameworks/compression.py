"""What compressors of all frameworks have in common."""

from __future__ import annotations

from typing import Any, Protocol


class Compressor(Protocol):
    """A pair of functions that run before and after a reduction, on tensors of the framework."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor to reduce, and a context for `decompress`."""
        ...

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the result in the form of the original tensor."""
        ...


class NoneCompressor:
    """Leaves tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Returns the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the tensor itself."""
        del ctx
        return tensor
