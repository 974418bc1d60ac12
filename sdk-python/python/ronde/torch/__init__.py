"""ronde for PyTorch: the calls that users of Horovod know.

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
from ronde.handle import Handle
from ronde.ops import Adasum, Average, Max, Min, Product, Sum
from ronde.torch.compression import Compression
from ronde.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ronde.torch.mpi_ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    poll,
    rank,
    shutdown,
    size,
    synchronize,
)
from ronde.torch.optimizer import DistributedOptimizer

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "FailureRecord",
    "Handle",
    "LastCall",
    "Max",
    "Min",
    "MismatchError",
    "PeerLostError",
    "Product",
    "RefusedError",
    "RondeError",
    "ShutDownError",
    "Sum",
    "TimedOutError",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]
