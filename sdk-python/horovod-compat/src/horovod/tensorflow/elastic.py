"""`horovod.tensorflow.elastic`: `ronde.tensorflow.elastic` with Horovod's names."""

from horovod.common.elastic import run_fn
from ronde.frameworks.basics import init_again as reset
from ronde.tensorflow.elastic import (
    HostsUpdatedInterrupt,
    HostUpdateResult,
    ObjectState,
    State,
    TensorFlowKerasState,
    TensorFlowState,
    run,
)

__all__ = [
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "reset",
    "run",
    "run_fn",
]
