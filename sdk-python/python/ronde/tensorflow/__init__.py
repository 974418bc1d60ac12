"""ronde for TensorFlow, with the functions of `horovod.tensorflow`.

import ronde.tensorflow as hvd

hvd.init()
tape = hvd.DistributedGradientTape(tape)
hvd.broadcast_variables(model.variables, root_rank=0)
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
from ronde.frameworks import needs_tensorflow  # noqa: F401 -- first, for its error
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
from ronde.frameworks.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from ronde.ops import Adasum, Average, Max, Min, Product, Sum
from ronde.tensorflow import elastic, gradients, session  # noqa: F401 -- registers the gradients
from ronde.tensorflow.compression import Compression
from ronde.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
)
from ronde.tensorflow.mpi_ops import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    grouped_allreduce,
    grouped_reducescatter,
    join,
    local_rank_op,
    local_size_op,
    process_set_included_op,
    rank_op,
    reducescatter,
    size_op,
)
from ronde.tensorflow.optimizer import DistributedOptimizer
from ronde.tensorflow.session import init
from ronde.tensorflow.sync_batch_norm import SyncBatchNormalization
from ronde.tensorflow.tape import (
    DistributedGradientTape,
    PartialDistributedGradientTape,
    check_num_rank_power_of_2,
    gpu_available,
)

HorovodInternalError = RondeError
"""The base of all errors of collectives, the session and the job, under Horovod's name."""

session.follow()

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "FailureRecord",
    "HorovodInternalError",
    "LastCall",
    "Max",
    "Min",
    "MismatchError",
    "PartialDistributedGradientTape",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "RefusedError",
    "RondeError",
    "ShutDownError",
    "Sum",
    "SyncBatchNormalization",
    "TimedOutError",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "ccl_built",
    "check_num_rank_power_of_2",
    "client",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "max_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
