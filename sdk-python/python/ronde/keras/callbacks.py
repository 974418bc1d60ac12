"""The callbacks for Keras 3 on any back end."""

from __future__ import annotations

from typing import Any

import keras

from ronde.frameworks.keras import callbacks
from ronde.keras.backend import backend as _backend

_Base: Any = keras.callbacks.Callback
_Checkpoint: Any = keras.callbacks.ModelCheckpoint


class BroadcastGlobalVariablesCallback(callbacks.BroadcastGlobalVariablesCallback, _Base):
    backend = _backend


class MetricAverageCallback(callbacks.MetricAverageCallback, _Base): ...


class LearningRateScheduleCallback(callbacks.LearningRateScheduleCallback, _Base):
    backend = _backend


class LearningRateWarmupCallback(callbacks.LearningRateWarmupCallback, _Base):
    backend = _backend


class BestModelCheckpoint(callbacks.BestModelCheckpoint, _Checkpoint):
    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        super().__init__(**callbacks.checkpoint_arguments(monitor, verbose, save_weights_only, mode, save_freq))
        self.filepath = callbacks.UNSET
