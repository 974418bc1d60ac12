"""Training with Optax and Flax on ranks' shares of batches, against one process on whole batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy
import optax
import ronde.jax as hvd
from flax import linen
from flax.training.train_state import TrainState

FEATURES, BATCH, STEPS = 5, 12, 8


class Model(linen.Module):
    """Two layers."""

    @linen.compact
    def __call__(self, rows: Any) -> Any:
        return linen.Dense(1)(jnp.tanh(linen.Dense(7)(rows)))[:, 0]


def batch(step: int) -> tuple[Any, Any]:
    rows = numpy.random.default_rng(step).normal(size=(BATCH, FEATURES)).astype("float32")
    return rows, rows.sum(1)


def loss_of(parameters: Any, rows: Any, wanted: Any) -> Any:
    return jnp.mean((Model().apply(parameters, rows) - wanted) ** 2)


def close(found: Any, expected: Any, what: str) -> None:
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        assert numpy.allclose(mine, other, rtol=1e-4, atol=1e-5), what


def share(step: int, rank: int, size: int) -> tuple[Any, Any]:
    rows, wanted = batch(step)
    return rows[rank::size], wanted[rank::size]


def trained(optimizer: Any, parameters: Any, rank: int, size: int, steps: int = STEPS) -> Any:
    """Trains with `optimizer` on this rank's share."""

    @jax.jit
    def step(parameters: Any, state: Any, rows: Any, wanted: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(parameters, rows, wanted)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, loss

    state = optimizer.init(parameters)
    for index in range(steps):
        parameters, state, _ = step(parameters, state, *share(index, rank, size))
    return parameters


def optimizers(rank: int, size: int) -> None:
    plain = optax.adamw(1e-2)
    start = Model().init(jax.random.key(rank), jnp.ones((1, FEATURES)))
    parameters = hvd.broadcast_parameters(start)
    close(parameters, Model().init(jax.random.key(0), jnp.ones((1, FEATURES))), "broadcast")
    alone = trained(plain, parameters, 0, 1)
    close(trained(hvd.DistributedOptimizer(plain), parameters, rank, size), alone, "DistributedOptimizer")
    clipped = optax.chain(hvd.DistributedOptimizer(optax.identity()), optax.clip_by_global_norm(0.1), optax.sgd(0.1))
    reference = optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1))
    close(trained(clipped, parameters, rank, size), trained(reference, parameters, 0, 1), "in a chain")
    several = optax.MultiSteps(hvd.DistributedOptimizer(plain), 2)
    close(trained(several, parameters, rank, size), trained(optax.MultiSteps(plain, 2), parameters, 0, 1), "MultiSteps")
    far = trained(plain, parameters, rank, size)
    assert not numpy.allclose(jax.tree.leaves(far)[0], jax.tree.leaves(alone)[0], rtol=1e-4, atol=1e-5), "no test"
    state = TrainState.create(apply_fn=Model().apply, params=parameters, tx=hvd.DistributedOptimizer(plain))
    for index in range(STEPS):
        gradients = jax.jit(jax.grad(loss_of))(state.params, *share(index, rank, size))
        state = jax.jit(lambda state, gradients: state.apply_gradients(grads=gradients))(state, gradients)
    close(state.params, alone, "Flax")


def functions(rank: int, size: int) -> None:
    parameters = {"a": jnp.ones(FEATURES), "count": jnp.int32(3)}

    def loss(parameters: Any, rows: Any) -> Any:
        return jnp.sum((rows @ parameters["a"]) ** 2) / len(rows), len(rows)

    rows = [share(0, each, size)[0] for each in range(size)]
    whole = jax.grad(lambda p: jnp.mean((batch(0)[0] @ p["a"]) ** 2), allow_int=True)(parameters)
    (value, count), gradients = hvd.value_and_grad(loss, has_aux=True, allow_int=True)(parameters, rows[rank])
    assert count == len(rows[rank])
    close(value, loss(parameters, rows[rank])[0], "the value is this rank's")
    close(gradients["a"], whole["a"], "value_and_grad")
    assert gradients["count"].dtype == jax.dtypes.float0
    gradients, count = jax.jit(hvd.grad(loss, has_aux=True, allow_int=True))(parameters, rows[rank])
    close(gradients["a"], whole["a"], "compiled grad")
    summed = hvd.grad(lambda p: loss(p, rows[rank])[0], op=hvd.Sum, allow_int=True)(parameters)
    close(summed["a"], whole["a"] * size, "sum")


def states(rank: int, size: int) -> None:
    """Everything that a training state has."""
    state = {
        "key": jax.random.key(rank),
        "old key": jax.random.PRNGKey(rank),
        "step": rank,
        "rate": 0.5 + rank,
        "is_last": rank == 0,
        "none": None,
        "array": numpy.full((2,), rank, "int16"),
        "half": jnp.full((3,), rank, "bfloat16"),
    }
    found = hvd.broadcast_parameters(state, root_rank=size - 1)
    last = size - 1
    assert (found["step"], found["rate"], found["is_last"], found["none"]) == (last, 0.5 + last, last == 0, None)
    assert (type(found["step"]), type(found["rate"]), type(found["is_last"])) == (int, float, bool)
    assert jax.random.uniform(found["key"]) == jax.random.uniform(jax.random.key(last))
    assert (found["old key"] == jax.random.PRNGKey(last)).all()
    assert found["array"].tolist() == [last, last]
    assert found["half"].dtype == jnp.bfloat16
    # JAX has no types of 64 bits, and all bits arrive.
    big = 2**40 + rank
    wide = {"count": numpy.full((2, 3), big), "rate": numpy.float64(0.1 + rank), "step": big, "tenth": 0.1}
    found = hvd.broadcast_parameters(wide, root_rank=last)
    assert (found["count"].dtype, found["count"].tolist()) == (numpy.int64, [[2**40 + last] * 3] * 2)
    assert (found["rate"], found["step"], found["tenth"]) == (0.1 + last, 2**40 + last, 0.1)
    compiled = jax.jit(lambda: hvd.broadcast_parameters(numpy.full(2, rank + 0.5), root_rank=last))()
    assert (compiled.dtype, compiled.tolist()) == (jnp.float32, [last + 0.5] * 2)
    adam = optax.adam(1e-3)
    moments = adam.init({"a": jnp.ones(3) * rank})
    assert jax.tree.structure(hvd.broadcast_parameters(moments)) == jax.tree.structure(moments)


def main() -> None:
    hvd.init()
    for part in (optimizers, functions, states):
        part(hvd.rank(), hvd.size())
    print(f"rank {hvd.rank()} of {hvd.size()}: training passed", flush=True)


if __name__ == "__main__":
    main()
