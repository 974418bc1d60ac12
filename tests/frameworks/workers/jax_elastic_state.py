"""The state of an elastic training with JAX: commits, restores and synchronization, on several ranks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ronde.jax as hvd


def refused(call: Any, kind: Any = ValueError) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")


def make() -> Any:
    weights = {"w": jnp.full((2, 3), float(hvd.rank())), "b": np.full(3, hvd.rank(), "float32")}
    return hvd.elastic.JaxState(weights=weights, key=jax.random.key(hvd.rank()), epoch=hvd.rank(), text=str(hvd.rank()))


def commits_and_restores() -> None:
    """Also what a program has taken over the memory of."""
    state = make()
    state.sync()
    assert (state.epoch, state.text) == (0, "0")
    np.testing.assert_array_equal(state.weights["w"], np.zeros((2, 3)))
    np.testing.assert_array_equal(state.weights["b"], np.zeros(3))
    assert (jax.random.key_data(state.key) == jax.random.key_data(jax.random.key(0))).all()
    step = jax.jit(lambda w: jax.tree.map(lambda x: x + hvd.allreduce(jnp.float32(1)), w), donate_argnums=0)
    state.weights = step(state.weights)
    state.epoch = 1
    state.commit()
    for _ in range(2):
        state.weights = step(state.weights)
        state.epoch += 1
        np.testing.assert_array_equal(state.weights["w"], np.full((2, 3), 2.0))
        state.restore()
        np.testing.assert_array_equal(state.weights["w"], np.full((2, 3), 1.0))
        assert state.epoch == 1


def continues_after_a_failure() -> None:
    """Ranks disagree on a shape once, in a program; the loop restores the commit and starts a new session."""
    state = make()
    calls = []

    @hvd.elastic.run
    def train(state: Any) -> str:
        calls.append(int(state.epoch))
        for _ in range(3):
            state.weights = {"w": jax.jit(lambda w: w + hvd.allreduce(jnp.float32(1)))(state.weights["w"])}
            state.epoch += 1
            state.commit()
        if len(calls) == 1:
            # JAX returns before the program has failed, so the commit is of what was never computed.
            bad = jax.jit(lambda w, x: w + hvd.allreduce(x).sum())
            state.weights, state.epoch = {"w": bad(state.weights["w"], jnp.ones(hvd.rank() + 1))}, 99
            state.commit()
        return "done"

    state.weights = {"w": state.weights["w"]}
    assert train(state) == "done"
    assert calls == [0, 3], calls
    np.testing.assert_array_equal(state.weights["w"], np.full((2, 3), 6.0))
    assert state.epoch == 6


def errors() -> None:
    state = hvd.elastic.JaxState(weights=jnp.zeros(2 + hvd.rank()))
    text = refused(state.sync)
    assert "JaxState: weights has a leaf float32[3] on rank 1, and a leaf float32[2] on rank 0" in text, text
    state = hvd.elastic.JaxState(**({"weights": jnp.zeros(2)} if hvd.rank() else {"weights": 3}))
    assert "no leaf on rank 0" in refused(state.sync)

    @hvd.elastic.run
    def of_the_program(state: Any) -> None:
        raise KeyError("mine")

    assert "mine" in refused(lambda: of_the_program(make()), KeyError)


refused(lambda: hvd.elastic.JaxState(weights=jnp.zeros(2)))
hvd.init()
for part in (commits_and_restores, continues_after_a_failure, errors):
    part()
print(f"rank {hvd.rank()} of {hvd.size()}: elastic state passed", flush=True)
hvd.shutdown()
