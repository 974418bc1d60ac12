"""Training that restores its last commit and continues when a collective fails.

state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)

@hvd.elastic.run
def train(state): ...

train(state)
"""

from __future__ import annotations

from typing import Callable, TypeVar

from ronde.elastic.loop import run_fn
from ronde.elastic.state import HostsUpdatedInterrupt, HostUpdateResult, ObjectState, State
from ronde.frameworks import basics
from ronde.torch.elastic.sampler import ElasticSampler
from ronde.torch.elastic.state import TorchState

__all__ = [
    "ElasticSampler",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "run",
]

Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates `func(state, *args, **kwargs)` with the loop of `ronde.elastic.run_fn`, on the session of `init`."""
    return run_fn(func, basics.init_again)
