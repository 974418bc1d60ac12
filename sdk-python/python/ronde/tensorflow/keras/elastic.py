"""Elastic training with `tf.keras`: the state, the callbacks and the loop."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ronde.frameworks.keras import elastic
from ronde.tensorflow.elastic import HostsUpdatedInterrupt, TensorFlowKerasState, run

__all__ = [
    "CommitStateCallback",
    "HostsUpdatedInterrupt",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

_Base: Any = tf.keras.callbacks.Callback


class KerasState(TensorFlowKerasState):
    """The state of a training run: a model, its optimizer, and keyword arguments. As `TensorFlowKerasState`."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


class CommitStateCallback(elastic.CommitStateCallback, _Base): ...


class UpdateBatchStateCallback(elastic.UpdateBatchStateCallback, _Base): ...


class UpdateEpochStateCallback(elastic.UpdateEpochStateCallback, _Base): ...
