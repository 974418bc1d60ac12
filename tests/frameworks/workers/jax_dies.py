"""A rank dies while others wait in a compiled program: they get its record."""

from __future__ import annotations

import os
import signal

import jax
import jax.numpy as jnp
import ronde
import ronde.jax as hvd


def main() -> None:
    hvd.init()
    step = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, c: hvd.allreduce(c, name="step"), x))
    assert float(step(jnp.float32(hvd.rank()))) == sum(range(hvd.size())) / hvd.size()
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        jax.block_until_ready(step(jnp.ones(4)))
    except jax.errors.JaxRuntimeError as error:
        failure = hvd.failure_of(error)
        assert isinstance(failure, ronde.PeerLostError), error
        assert failure.rank == 1
        assert failure.record is not None
        assert failure.record.signal == signal.SIGKILL
        assert str(error).startswith("ABORTED: ")
        print(f"rank {hvd.rank()} knows: {failure.record.last_call}", flush=True)
    else:
        raise AssertionError("a program completed without rank 1")
    os._exit(0)


if __name__ == "__main__":
    main()
