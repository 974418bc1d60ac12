"""`horovod.torch.elastic`: `ronde.torch.elastic` with Horovod's submodules."""

from horovod.common.elastic import run_fn
from horovod.torch.elastic import sampler, state
from horovod.torch.elastic.sampler import ElasticSampler
from ronde.frameworks.basics import init_again as reset
from ronde.torch.elastic import (
    HostsUpdatedInterrupt,
    HostUpdateResult,
    ObjectState,
    State,
    TorchState,
    run,
)

__all__ = [
    "ElasticSampler",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TorchState",
    "reset",
    "run",
    "run_fn",
    "sampler",
    "state",
]
