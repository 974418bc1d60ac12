"""Collectives for JAX: eagerly, and in programs of `jax.jit`, `jax.grad`, `jax.vmap` and `jax.lax.scan`.

    import ronde.jax as hvd

    hvd.init()
    parameters = hvd.broadcast_parameters(parameters)
    loss, gradients = hvd.value_and_grad(loss_of)(parameters, batch)

Start the program with `ronde run -np N python program.py`. docs/JAX.md has the rules.
"""

from ronde.frameworks import needs_jax  # noqa: F401 -- first, for its error
from ronde.jax import elastic
from ronde.jax.collectives import (
    allgather,
    allreduce,
    alltoall,
    barrier,
    broadcast,
    grouped_allreduce,
    reducescatter,
)
from ronde.jax.session import (
    add_process_set,
    client,
    cross_rank,
    cross_size,
    failure_of,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    max_size,
    rank,
    remove_process_set,
    shutdown,
    size,
)
from ronde.jax.training import (
    DistributedOptimizer,
    GradientTransformation,
    allreduce_gradients,
    broadcast_parameters,
    grad,
    value_and_grad,
)
from ronde.ops import Adasum, Average, BitAnd, BitOr, BitXor, Max, Min, Product, Sum
from ronde.process_set import ProcessSet

__all__ = [
    "Adasum",
    "Average",
    "BitAnd",
    "BitOr",
    "BitXor",
    "DistributedOptimizer",
    "GradientTransformation",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "allreduce_gradients",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_parameters",
    "client",
    "cross_rank",
    "cross_size",
    "elastic",
    "failure_of",
    "grad",
    "grouped_allreduce",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "max_size",
    "rank",
    "reducescatter",
    "remove_process_set",
    "shutdown",
    "size",
    "value_and_grad",
]
