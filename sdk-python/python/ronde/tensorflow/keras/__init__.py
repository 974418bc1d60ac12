"""ronde for `tf.keras`, with the functions of `horovod.tensorflow.keras`. Keras 3, or tf-keras where tf.keras is that.

import ronde.tensorflow.keras as hvd

hvd.init()
model.compile(optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01 * hvd.size())), loss=...)
model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ronde.frameworks.keras import models
from ronde.frameworks.keras.optimizer import variables_of_layers
from ronde.frameworks.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ronde.ops import Average, Sum
from ronde.tensorflow import (
    HorovodInternalError,
    ccl_built,
    client,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    max_size,
    mpi_built,
    mpi_enabled,
    mpi_ops,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from ronde.tensorflow.compression import Compression, Compressor
from ronde.tensorflow.functions import broadcast_global_variables as _broadcast_global_variables
from ronde.tensorflow.keras import callbacks, elastic
from ronde.tensorflow.keras.optimizer import wrap
from ronde.tensorflow.reduction import Options

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "callbacks",
    "ccl_built",
    "client",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "max_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def DistributedOptimizer(  # noqa: N802 -- Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns a copy of an optimizer of Keras that reduces gradients over all ranks before it applies them.

    The arguments are those of `ronde.tensorflow.DistributedOptimizer`. Raises ValueError for options that exclude each
    other, for another `op` than Average and Sum, and for anything that is no optimizer of Keras.
    """
    options = Options(
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        prefix="DistributedOptimizer",
    )
    return wrap(optimizer, name, options, backward_passes_per_step, average_aggregated_gradients)


def PartialDistributedOptimizer(  # noqa: N802 -- Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
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
    """As `DistributedOptimizer`; the gradients of `local_layers`, a built layer or a list of them, stay local.

    Raises ValueError for anything else among the layers.
    """
    distributed = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in variables_of_layers(local_layers):
        distributed.register_local_var(variable)
    return distributed


def _evaluated(result: Any) -> Any:
    """Returns a tensor when executing eagerly, and its value in a graph of TensorFlow 1."""
    return result if tf.executing_eagerly() else tf.compat.v1.keras.backend.get_session().run(result)


def broadcast_global_variables(root_rank: int) -> Any:
    """Assigns rank `root_rank`'s values to all variables of a graph of TensorFlow 1. Raises RuntimeError eagerly."""
    return _evaluated(_broadcast_global_variables(root_rank))


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: type[Compressor] = Compression.none,
) -> Any:
    """Reduces a value that `tf.constant` takes. As `ronde.tensorflow.allreduce`."""
    reduced = mpi_ops.allreduce(
        tf.convert_to_tensor(value),
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )
    return _evaluated(reduced)


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenates all ranks' values along the first dimension. As `ronde.tensorflow.allgather`."""
    return _evaluated(mpi_ops.allgather(value, name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Broadcasts the value of rank `root_rank`. As `ronde.tensorflow.broadcast`."""
    return _evaluated(mpi_ops.broadcast(value, root_rank, name))


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduces values and returns this rank's rows. As `ronde.tensorflow.reducescatter`."""
    return _evaluated(mpi_ops.reducescatter(value, op=op, name=name))


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: type[Compressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Loads a model. Its optimizer reduces gradients, whether or not the saved one did, and has the saved state.

    filepath          -- a path, or an open `h5py.File`
    custom_optimizers -- classes of optimizers that are not Keras' own
    custom_objects    -- further classes and functions, by name
    legacy_opts       -- accepted for Horovod's programs; has no effect
    """
    del legacy_opts
    return models.load_model(
        tf.keras.models.load_model,
        lambda optimizer: DistributedOptimizer(optimizer, compression=compression),
        filepath,
        custom_optimizers,
        custom_objects,
    )
