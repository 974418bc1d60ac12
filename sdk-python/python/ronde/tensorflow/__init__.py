"""ronde for TensorFlow, with the functions of `horovod.tensorflow`.

import ronde.tensorflow as hvd

hvd.init()
tape = hvd.DistributedGradientTape(tape)
hvd.broadcast_variables(model.variables, root_rank=0)
"""

from ronde.errors import RondeError
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
from ronde.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape

HorovodInternalError = RondeError
"""The base of all errors of collectives, the session and the job, under Horovod's name."""

session.follow()


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Returns whether TensorFlow has a GPU. The arguments are Horovod's, and have no effect."""
    import tensorflow as tf

    del ext_base_name, verbose
    return bool(tf.config.list_physical_devices("GPU"))


def check_num_rank_power_of_2(num_rank: int) -> bool:
    """Returns whether a number is a power of two."""
    return num_rank > 0 and num_rank & (num_rank - 1) == 0
