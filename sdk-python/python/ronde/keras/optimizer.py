"""Optimizers of Keras 3 that reduce gradients, on its back ends PyTorch and JAX."""

from __future__ import annotations

from typing import Any

from ronde.frameworks.compression import NoneCompressor
from ronde.frameworks.keras.optimizer import variables_of_layers, wrap
from ronde.frameworks.process_sets import ProcessSet, global_process_set
from ronde.keras.backend import NAME
from ronde.keras.reducer import Options
from ronde.ops import Average

__all__ = ["Compression", "PartialDistributedOptimizer"]

if NAME == "jax":
    from ronde.keras.jax import Compression
    from ronde.keras.jax import JaxReducer as _Reducer
elif NAME == "torch":
    from ronde.keras.torch import TorchReducer as _Reducer  # type: ignore[assignment]
    from ronde.torch.compression import Compression  # type: ignore[assignment]
else:
    _Reducer = None  # type: ignore[assignment, misc]

    class Compression:  # type: ignore[no-redef]
        """The compressors; only `none` for a back end that does not train."""

        none = NoneCompressor


def PartialDistributedOptimizer(  # noqa: N802 -- Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    num_groups: int = 0,
) -> Any:
    """As `ronde.tensorflow.keras.PartialDistributedOptimizer`, for Keras on PyTorch and JAX.

    device_dense, device_sparse -- accepted for Horovod's programs; have no effect

    Raises NotImplementedError for groups, and on JAX for `backward_passes_per_step` above 1; ValueError for options
    that exclude each other, for another `op` than Average and Sum, and for anything that is no optimizer of Keras.
    """
    del device_dense, device_sparse
    if groups is not None or num_groups:
        raise NotImplementedError(
            f"groups of gradients are for Keras on TensorFlow; leave them out on {NAME}, where all gradients of a step "
            "are in flight at once"
        )
    options = Options(
        op=op,
        compression=compression,
        predivide=gradient_predivide_factor,
        process_set=process_set,
        passes=backward_passes_per_step,
        average=average_aggregated_gradients,
        scale_local=scale_local_gradients,
        sparse_as_dense=sparse_as_dense,
    )
    if _Reducer is None:
        raise NotImplementedError(f"Keras' back end is {NAME}, which does not train; use tensorflow, torch or jax")
    reducer = _Reducer(options)
    for variable in variables_of_layers(local_layers):
        reducer.register_local(variable)
    return wrap(optimizer, name, reducer)
