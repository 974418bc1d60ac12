"""Sessions after one another: with another rank or size, sets that are removed, and another framework's."""

from __future__ import annotations

import os
import pathlib
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy
import pytest
import ronde.jax as hvd
from ronde import own_sidecar
from ronde.frameworks import basics, world

gather = jax.jit(hvd.allgather)
root_gradient = jax.jit(jax.grad(lambda x: jnp.sum(hvd.broadcast(x, 0))))


def alone() -> None:
    """A job of one rank, before the process takes part in its job."""
    own = own_sidecar.start(1, "alone")
    hvd.init(socket=own.socket, job=own.job, rank=0, token_file=pathlib.Path(own.socket) / "rank-0.token")
    assert hvd.size() == 1
    assert gather(jnp.ones(2)).tolist() == [1, 1]
    assert root_gradient(jnp.ones(2)).tolist() == [1, 1]
    hvd.shutdown()


def another_rank() -> None:
    """A program of one session in the next one, where this process has another rank."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    assert gather(jnp.full(1, rank)).tolist() == list(range(size))
    assert root_gradient(jnp.ones(1)).tolist() == [0 if rank else size]
    compiled = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum)).lower(jnp.ones(2)).compile()
    _, pull = jax.vjp(lambda x: hvd.allreduce(x, hvd.Sum), jnp.ones(2))
    assert pull(jnp.ones(2))[0].tolist() == compiled(jnp.ones(2)).tolist() == [size, size]
    hvd.shutdown()
    other = size - 1 - rank
    hvd.init(rank=other, token_file=pathlib.Path(os.environ["RONDE_TOKEN_FILE"]).with_name(f"rank-{other}.token"))
    assert hvd.rank() == other
    assert root_gradient(jnp.ones(1)).tolist() == [0 if hvd.rank() else size]
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"Compile it again after ronde\.jax\.init"):
        jax.block_until_ready(compiled(jnp.ones(2)))
    with pytest.raises(ValueError, match="Trace the function again"):
        pull(jnp.ones(2))
    hvd.shutdown()


def removed_set() -> None:
    """A gradient of a set that is gone is none of all ranks."""
    hvd.init()
    first = hvd.add_process_set([0])
    pull = jax.vjp(lambda x: hvd.allreduce(x, process_set=first), jnp.ones(2))[1] if hvd.rank() == 0 else None
    hvd.remove_process_set(first)
    if pull is not None:
        with pytest.raises(ValueError, match="Trace the function again"):
            pull(jnp.ones(2))
    hvd.barrier()


def several_threads() -> None:
    """Threads whose operations have different names start in another order on each rank."""
    hvd.init()
    results: dict[str, Any] = {}

    def perform(name: str) -> None:
        step = jax.jit(lambda x: hvd.allreduce(x @ x, hvd.Sum, name=name))
        results[name] = [numpy.asarray(step(jnp.full((40, 40), index + 1.0)))[0, 0] for index in range(10)]

    threads = [threading.Thread(target=perform, args=(name,)) for name in ("a", "b")]
    for thread in threads if hvd.rank() % 2 else threads[::-1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["a"] == results["b"] == [40 * hvd.size() * (index + 1.0) ** 2 for index in range(10)], results


def of_another_framework() -> None:
    """The session of `ronde.torch` and `ronde.tensorflow`, which is that of `ronde.frameworks`."""
    hvd.shutdown()
    basics.init()
    hvd.init()
    assert hvd.client() is world.current().client
    assert gather(jnp.full(1, hvd.rank())).tolist() == list(range(hvd.size()))
    hvd.shutdown()
    assert basics.is_initialized()
    assert world.current().client.allreduce(numpy.ones(1), hvd.Sum).tolist() == [basics.size()]
    after_a_restart()


def after_a_restart() -> None:
    """`init` takes the next session of the other framework, or begins one if that has none."""
    hvd.init()
    assert hvd.client() is world.current().client
    basics.shutdown()
    basics.init()
    hvd.init()
    assert hvd.client() is world.current().client
    ranks = list(range(hvd.size()))
    assert gather(jnp.full(1, hvd.rank())).tolist() == ranks
    assert hvd.allreduce(jnp.ones(1), hvd.Sum).tolist() == [len(ranks)]
    basics.shutdown()
    hvd.init()
    assert not basics.is_initialized()
    assert gather(jnp.full(1, hvd.rank())).tolist() == ranks
    hvd.shutdown()
    basics.init()


def main() -> None:
    for part in (alone, another_rank, removed_set, several_threads, of_another_framework):
        part()
    print(f"rank {basics.rank()} of {basics.size()}: sessions passed", flush=True)


if __name__ == "__main__":
    main()
