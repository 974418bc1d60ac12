"""An elastic training with RONDE_ON_FAILURE=continue loses a worker: no step is repeated, no commit restored."""

from __future__ import annotations

import os
import signal
from typing import Any

import jax.numpy as jnp
import ronde.jax as hvd

STEPS, LOST_AT = 30, 10
WORKER = int(os.environ["RONDE_WORKER"])
hvd.init()
assert hvd.client().on_failure == "continue"
state = hvd.elastic.JaxState(total=jnp.float32(0), step=0)
steps: list[int] = []
calls: list[tuple[int, int]] = []


@hvd.elastic.run
def train(state: Any) -> None:
    calls.append((state.step, hvd.size()))
    while state.step < STEPS:
        steps.append(state.step)
        if state.step == LOST_AT and WORKER == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        state.total = state.total + hvd.allreduce(jnp.float32(1), name="step")
        state.step += 1
        if state.step % 5 == 0:
            state.commit()


train(state)
assert float(state.total) == STEPS, state.total
if WORKER in (0, 2):
    assert steps == list(range(STEPS)), steps
    # The first commit after the loss ends the call, before one that a replacement ends.
    assert calls[:2] == [(0, 3), (15, 2)], calls
    print(f"worker {WORKER}: no step was repeated", flush=True)
hvd.shutdown()
