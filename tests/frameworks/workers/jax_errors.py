"""Errors arrive in ronde's words, on all ranks, and the next step works."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import ronde
import ronde.jax as hvd
from ronde.frameworks import basics


def next_step_works(rank: int, size: int) -> None:
    assert float(hvd.allreduce(jnp.float32(rank), hvd.Sum)) == sum(range(size))
    assert float(jax.jit(lambda x: hvd.allreduce(x, hvd.Sum))(jnp.float32(rank))) == sum(range(size))


def mismatches(rank: int, size: int) -> None:
    different: dict[str, Any] = {
        "shape": lambda: hvd.allreduce(jnp.ones(3 + rank)),
        "dtype": lambda: hvd.allreduce(jnp.ones(3, "float32" if rank else "int32"), hvd.Sum),
        "operation": lambda: hvd.allreduce(jnp.ones(3), hvd.Sum if rank else hvd.Max),
        "root": lambda: hvd.broadcast(jnp.ones(3), rank),
        "shape in a group": lambda: hvd.grouped_allreduce([jnp.ones(2), jnp.ones(3 + rank)]),
    }
    for what, call in different.items():
        with pytest.raises(ronde.MismatchError) as eager:
            call()
        with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT") as compiled:
            jax.block_until_ready(jax.jit(call)())
        failure = hvd.failure_of(compiled.value)
        assert isinstance(failure, ronde.MismatchError), (what, compiled.value)
        assert failure.cause == "mismatch"
        # The words are the client's, with the code that `ronde explain` knows.
        assert failure.code == "RONDE-E306"
        assert f"[{failure.code}]" in str(failure)
        assert str(failure) in str(compiled.value), (what, compiled.value)
        assert "rank" in str(eager.value), eager.value
        next_step_works(rank, size)


def in_flight(rank: int, size: int) -> None:
    """A program that fails while it is in flight. The last one stays the last, and is not reported again at exit."""
    big = jnp.ones((600, 600))
    fails = jax.jit(lambda x: hvd.allreduce((x @ x)[: 3 + rank], hvd.Sum))
    works = jax.jit(lambda x: hvd.allreduce((x @ x)[:1, :1], hvd.Sum))
    for _ in range(3):
        with pytest.raises(jax.errors.JaxRuntimeError, match="rank"):
            jax.block_until_ready(fails(big))
        next_step_works(rank, size)
    # Independent programs after it work on all ranks, and what depends on it fails on all ranks.
    failing = fails(big)
    assert float(works(big)[0, 0]) == 600 * size
    with pytest.raises(jax.errors.JaxRuntimeError, match="rank"):
        jax.block_until_ready(works(jnp.pad(failing, ((0, 597 - rank), (0, 0)))))
    next_step_works(rank, size)
    failing = fails(big)
    with pytest.raises(jax.errors.JaxRuntimeError, match="rank"):
        jax.effects_barrier()
    jax.effects_barrier()
    with pytest.raises(jax.errors.JaxRuntimeError, match="rank"):
        jax.block_until_ready(failing)
    assert float(works(big)[0, 0]) == 600 * size
    next_step_works(rank, size)
    with pytest.raises(jax.errors.JaxRuntimeError, match="rank"):
        jax.block_until_ready(fails(big))


def arguments(rank: int, size: int) -> None:
    """Wrong arguments fail on this rank alone, before anybody waits."""
    three = jnp.ones(3)
    wrong: list[tuple[str, Any]] = [
        ("a scalar", lambda: hvd.allgather(jnp.float32(1))),
        ("a scalar", lambda: hvd.reducescatter(jnp.float32(1))),
        ("rows is", lambda: hvd.allgather(three, rows=[7] * size)),
        ("a number from 0 for each", lambda: hvd.allgather(three, rows=[3])),
        (
            "does not add up",
            lambda: hvd.alltoall(three, [9] * size),
        ),
        ("give splits", lambda: hvd.alltoall(jnp.ones(size + 1))),
        ("root_rank is", lambda: hvd.broadcast(three, size)),
        ("other than 0", lambda: hvd.allreduce(three, prescale_factor=0.0)),
        ("op is", lambda: hvd.allreduce(three, "sum")),
        ("op is 99", lambda: hvd.allreduce(three, 99)),
        ("op is 8", lambda: hvd.reducescatter(three, 8)),
        ("codec is 'float8'", lambda: hvd.allreduce(three, codec="float8")),
        ("codec is 16", lambda: hvd.grouped_allreduce([three, three], codec=16)),
        ("Sum or an Average", lambda: hvd.allreduce(three * 1j, hvd.Max)),
        ("without scales", lambda: hvd.allreduce(three.astype("uint32"))),
        ("convert it to bfloat16", lambda: hvd.allreduce(three.astype("float8_e5m2"), hvd.Sum)),
        ("does not take int4", lambda: hvd.allgather(three.astype("int4"))),
        ("give a text", lambda: hvd.allreduce(three, name=5)),
        ("a leaf is a builtins.str", lambda: hvd.broadcast_parameters({"a": "b"})),
    ]
    for words, call in wrong:
        for attempt in (call, lambda call=call: jax.jit(call)()):
            with pytest.raises(ValueError, match=words):
                attempt()
    with pytest.raises(ValueError, match="needs received_splits"):
        jax.jit(lambda x: hvd.alltoall(x, [1] * size))(jnp.ones(size))
    with pytest.raises(ValueError, match="so give numbers"):
        jax.jit(hvd.alltoall)(jnp.ones(size), jnp.ones(size, int))
    next_step_works(rank, size)


def shapes(rank: int, size: int) -> None:
    """Rows that differ from what the program was compiled for."""
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"was compiled for .* rows="):
        jax.block_until_ready(jax.jit(hvd.allgather)(jnp.ones(2 + rank * rank)))
    next_step_works(rank, size)
    if size == 2:
        with pytest.raises(ValueError, match="which the gradient needs"):
            jax.grad(lambda x: jnp.sum(hvd.allgather(x)))(jnp.ones(2 + rank))
        next_step_works(rank, size)


def devices() -> None:
    """A program for another device is refused while it is compiled."""
    traced = jax.jit(hvd.allreduce).trace(jnp.ones(3))
    with pytest.raises(NotImplementedError, match="runs on CPUs only, and this one is compiled for cuda"):
        traced.lower(lowering_platforms=("cuda",))


def without_session(kept: Any) -> None:
    for call in (
        lambda: hvd.allreduce(jnp.ones(3)),
        # A function that was not compiled before.
        lambda: jax.jit(lambda x: hvd.allreduce(x))(jnp.ones(3)),  # noqa: PLW0108
        hvd.rank,
    ):
        with pytest.raises(ValueError, match=r"call ronde\.jax\.init\(\) first"):
            call()
    if kept is not None:
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"no open session .* init\(\) first"):
            jax.block_until_ready(kept(jnp.ones(3)))
        assert hvd.failure_of(ValueError("something else")) is None


def main() -> None:
    without_session(None)
    hvd.init()
    with pytest.raises(ValueError, match="a client and settings"):
        hvd.shutdown() or hvd.init(object(), job="x")  # type: ignore[arg-type]
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    kept = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum))
    jax.block_until_ready(kept(jnp.ones(3)))
    mismatches(rank, size)
    arguments(rank, size)
    shapes(rank, size)
    devices()
    in_flight(rank, size)
    print(f"rank {rank} of {size}: errors passed", flush=True)
    hvd.barrier()
    hvd.shutdown()
    without_session(kept)
    # Another framework of this process has a session: its own is that.
    basics.init()
    hvd.init()
    assert hvd.client() is basics.client()
    next_step_works(hvd.rank(), size)
    hvd.shutdown()
    assert basics.is_initialized()
    basics.shutdown()
    print(f"rank {rank} of {size}: after shutdown", flush=True)


if __name__ == "__main__":
    main()
