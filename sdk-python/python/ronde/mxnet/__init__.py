"""ronde for MXNet, with the functions of `horovod.mxnet`.

import ronde.mxnet as hvd

hvd.init()
hvd.broadcast_parameters(model.collect_params(), root_rank=0)
trainer = hvd.DistributedTrainer(model.collect_params(), "sgd", {"learning_rate": 0.1})
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
from ronde.frameworks import needs_mxnet  # noqa: F401 -- first, for its error
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
from ronde.frameworks.objects import allgather_object, broadcast_object
from ronde.frameworks.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ronde.mxnet.compression import Compression
from ronde.mxnet.functions import broadcast_parameters
from ronde.mxnet.mpi_ops import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    reducescatter,
)
from ronde.mxnet.optimizer import DistributedOptimizer, DistributedTrainer
from ronde.ops import Adasum, Average, Max, Min, Product, Sum

HorovodInternalError = RondeError
"""The base of all errors of collectives, the session and the job, under Horovod's name."""

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "FailureRecord",
    "HorovodInternalError",
    "LastCall",
    "Max",
    "Min",
    "MismatchError",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "RefusedError",
    "RondeError",
    "ShutDownError",
    "Sum",
    "TimedOutError",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "ccl_built",
    "client",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
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
