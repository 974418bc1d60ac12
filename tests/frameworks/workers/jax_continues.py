"""With on_failure="continue" a rank dies: calls on arrays continue, a program fails, and compiled again it works."""

from __future__ import annotations

import os
import signal

import jax
import jax.numpy as jnp
import pytest
import ronde
import ronde.jax as hvd

WORKER = int(os.environ["RONDE_WORKER"])


def main() -> None:
    hvd.init(on_failure="continue")
    step = jax.jit(lambda x: hvd.allreduce(x, hvd.Sum, name="step"))
    assert float(step(jnp.float32(WORKER))) == 3
    if WORKER == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(jax.errors.JaxRuntimeError, match="ABORTED") as raised:
        jax.block_until_ready(step(jnp.float32(WORKER)))
    assert isinstance(hvd.failure_of(raised.value), ronde.PeerLostError), raised.value
    assert float(hvd.allreduce(jnp.float32(WORKER), hvd.Sum, name="eager")) == 2
    assert (hvd.size(), hvd.max_size()) == (2, 3)
    assert float(step(jnp.float32(WORKER))) == 2
    print(f"worker {WORKER}: rank {hvd.rank()} of {hvd.size()} continues", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
