"""ronde for PyTorch, with the functions of `horovod.torch`.

import ronde.torch as hvd

hvd.init()
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
"""

from ronde.errors import (
    FailureRecord,
    LastCall,
    MismatchError,
    PeerLostError,
    RefusedError,
    RondeError,
    ShutDownError,
    TimedOutError,
)
from ronde.frameworks import needs_torch  # noqa: F401 -- first, for its error
from ronde.frameworks.basics import (
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
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from ronde.frameworks.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ronde.ops import Adasum, Average, Max, Min, Product, Sum
from ronde.plugins import Plugin, PluginOp
from ronde.torch import elastic
from ronde.torch.compression import Compression
from ronde.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ronde.torch.gpu_memory import gpu_pool
from ronde.torch.mpi_ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    join,
    poll,
    reducescatter,
    reducescatter_async,
    synchronize,
)
from ronde.torch.objects import allgather_object, broadcast_object
from ronde.torch.optimizer import DistributedOptimizer
from ronde.torch.shared import empty
from ronde.torch.sparse import sparse_allreduce_async
from ronde.torch.sync_batch_norm import SyncBatchNorm

HorovodInternalError = RondeError
"""The base of all errors of collectives, the session and the job, under Horovod's name."""

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "FailureRecord",
    "HorovodInternalError",
    "LastCall",
    "Max",
    "Min",
    "MismatchError",
    "PeerLostError",
    "Plugin",
    "PluginOp",
    "ProcessSet",
    "Product",
    "RefusedError",
    "RondeError",
    "ShutDownError",
    "Sum",
    "SyncBatchNorm",
    "TimedOutError",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "client",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "empty",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_pool",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "max_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]
