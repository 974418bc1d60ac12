"""ronde for Keras 3, with the functions of `horovod.keras`, on its back ends TensorFlow, PyTorch and JAX.

import ronde.keras as hvd

hvd.init()
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01 * hvd.size())), loss=...)
model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from __future__ import annotations

from typing import Any

from ronde.errors import RondeError
from ronde.frameworks import needs_keras  # noqa: F401 -- first, for its error
from ronde.frameworks.basics import (
    ccl_built,
    client,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    max_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from ronde.frameworks.keras import models
from ronde.frameworks.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    members_of,
    remove_process_set,
    root_of,
)
from ronde.keras import callbacks, elastic
from ronde.keras.backend import NAME
from ronde.ops import Adasum, Average, Sum

import keras  # isort: skip -- after the check

if NAME == "tensorflow":
    from ronde.tensorflow.compression import Compression
    from ronde.tensorflow.keras import PartialDistributedOptimizer, init
else:
    from ronde.keras.optimizer import Compression, PartialDistributedOptimizer  # type: ignore[assignment]
    from ronde.keras.session import init

HorovodInternalError = RondeError
"""The base of all errors of collectives, the session and the job, under Horovod's name."""

__all__ = [
    "Adasum",
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
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = Average,
    num_groups: int = 0,
    groups: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Returns a copy of an optimizer of Keras that reduces gradients over all ranks before it applies them.

    The arguments are those of `ronde.tensorflow.DistributedOptimizer`. On PyTorch and JAX, devices have no effect and
    groups raise NotImplementedError, and so does `backward_passes_per_step` above 1 on JAX. Raises ValueError for
    options that exclude each other, for another `op` than Average and Sum, and for anything that is no optimizer of
    Keras.
    """
    return PartialDistributedOptimizer(
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
        groups,
        process_set,
        num_groups=num_groups,
    )


def broadcast_global_variables(root_rank: int) -> Any:
    """Assigns all variables of a graph of TensorFlow 1. Raises RuntimeError elsewhere: use the callback instead."""
    if NAME != "tensorflow":
        raise RuntimeError("hvd.broadcast_global_variables() needs a graph of TensorFlow 1; use the callback instead")
    import ronde.tensorflow.keras as hvd

    return hvd.broadcast_global_variables(root_rank)


def _array(value: Any) -> Any:
    return keras.ops.convert_to_numpy(value)


def _members() -> Any:
    return members_of(global_process_set)


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Any = None,
) -> Any:
    """Reduces a tensor or an array, by default to the average. Returns an array of NumPy.

    compression -- accepted for Horovod's programs; has no effect

    Raises ValueError for `average` together with `op`.
    """
    del compression
    if average is not None and op is not None:
        raise ValueError("The op parameter supersedes average; give only op.")
    op = (Sum if average is False else Average) if op is None else op
    return client().allreduce(_array(value), op, name, prescale_factor, postscale_factor, process_set=_members())


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenates all ranks' tensors or arrays along the first dimension. Returns an array of NumPy."""
    return client().allgather(_array(value), name, process_set=_members())


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Broadcasts the tensor or array of rank `root_rank`. Returns an array of NumPy."""
    return client().broadcast(_array(value), root_of(root_rank, global_process_set), name, process_set=_members())


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Reduces a tensor or an array and returns this rank's rows, as an array of NumPy."""
    return client().reduce_scatter(_array(value), op, name, process_set=_members())


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
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
        keras.models.load_model,
        lambda optimizer: DistributedOptimizer(optimizer, compression=compression),
        filepath,
        custom_optimizers,
        custom_objects,
    )
