"""The reduction of gradients of Keras 3 on JAX, in the program of `fit` and outside of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

import ronde.jax as hvd
from ronde.frameworks import process_sets
from ronde.frameworks.compression import Compressor, NoneCompressor
from ronde.jax import session
from ronde.keras.reducer import GradientReducer, Options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

session.share()


class JaxReducer(GradientReducer):
    """Reduces gradients of JAX, as one group.

    Raises NotImplementedError for several passes, whose sums a compiled program cannot keep in an object.
    """

    def __init__(self, options: Options) -> None:
        if options.passes != 1:
            raise NotImplementedError(
                "backward_passes_per_step has no meaning for Keras on JAX, whose step is a compiled program; give the "
                f"optimizer gradient_accumulation_steps={options.passes} instead"
            )
        super().__init__(options)

    def begin(self) -> None:
        """Returns the state of an optimizer: none."""

    def run(
        self,
        state: None,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        apply: Callable[[list[Any]], Any],
        skip: Callable[[], Any],
    ) -> Any:
        """Reduces gradients and applies them."""
        del state, skip
        return apply(self.reduced(gradients, variables))

    def reduce(self, indices: Sequence[int], gradients: Sequence[Any]) -> Sequence[Any]:
        """Returns the reductions of gradients, as one operation."""
        del indices
        options = self.options
        reduced: Sequence[Any] = hvd.grouped_allreduce(
            list(gradients),
            options.op,
            "DistributedOptimizer",
            1.0 / options.predivide,
            options.predivide,
            process_set=process_sets.members_of(options.process_set),
        )
        return reduced


class _Cast:
    """Reduces floating-point arrays in another type."""

    dtype: Any

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Returns the array in the other type, if it has floating-point elements."""
        is_floating = jnp.issubdtype(tensor.dtype, jnp.floating)
        return (tensor.astype(cls.dtype) if is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Returns the array in its original type."""
        return tensor.astype(ctx)


class FP16Compressor(_Cast):
    """Reduces floating-point arrays in half precision, to which sums are rounded between sidecars."""

    dtype = jnp.float16


class BF16Compressor(_Cast):
    """Reduces floating-point arrays in bfloat16, which has the range of float32 and to which sums are rounded."""

    dtype = jnp.bfloat16


class Compression:
    """The compressors. Any class with `compress` and `decompress` is one."""

    none: type[Compressor] = NoneCompressor
    fp16: type[Compressor] = FP16Compressor
    bf16: type[Compressor] = BF16Compressor
