"""States of PyTorch's objects, and the registry for further types: `ronde.torch.elastic.state`."""

from horovod.common.elastic import ObjectState
from horovod.torch.elastic.sampler import ElasticSampler
from ronde.torch import broadcast_object, broadcast_optimizer_state, broadcast_parameters, rank
from ronde.torch.elastic.state import (
    ModelStateHandler,
    OptimizerStateHandler,
    SamplerStateHandler,
    StateHandler,
    TorchState,
    get_handler_registry,
    set_handler_registry,
)

__all__ = [
    "ElasticSampler",
    "ModelStateHandler",
    "ObjectState",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "get_handler_registry",
    "rank",
    "set_handler_registry",
]
