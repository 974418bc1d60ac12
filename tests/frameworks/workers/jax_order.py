"""Ranks compile different programs around the same collectives. XLA would perform independent ones in another order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy
import ronde.jax as hvd

COUNT = 24


def main() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()

    def program(x):  # type: ignore[no-untyped-def]
        """Independent collectives, whose inputs are ready at other times on each rank."""
        results = []
        for index in range(COUNT):
            tensor = x * index
            for _ in range((index * 7 + rank * 11) % 5):
                tensor = tensor @ tensor * 0 + tensor
            results.append(hvd.allreduce(tensor + rank, hvd.Sum))
        return results if rank % 2 else results[::-1]

    for height in (4, 200):  # XLA performs programs of small tensors step by step, and others in parallel
        x = jnp.ones((height, height))
        for _ in range(3):
            found = jax.jit(program)(x)
            found = found if rank % 2 else found[::-1]
            for index, result in enumerate(found):
                assert numpy.allclose(result, size * index + sum(range(size))), (index, result)
    # Two programs in flight at the same time, and calls outside of programs between them.
    one, two = jax.jit(lambda x: hvd.allreduce(x @ x, hvd.Sum)), jax.jit(lambda x: hvd.allreduce(x - 1, hvd.Max))
    x = jnp.ones((400, 400))
    pending = []
    for index in range(10):
        pending += [one(x), two(x)]
        assert float(hvd.allreduce(jnp.float32(rank), hvd.Sum)) == sum(range(size)), index
    assert all(float(each[0, 0]) == 400 * size for each in pending[::2])
    assert all(float(each[0, 0]) == 0 for each in pending[1::2])
    # What nobody uses is performed all the same: other ranks may wait for it.
    jax.jit(lambda x: (hvd.allreduce(x, hvd.Sum), x)[1])(x)
    jax.effects_barrier()
    print(f"rank {rank} of {size}: in order", flush=True)


if __name__ == "__main__":
    main()
