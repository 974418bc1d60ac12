"""The callbacks for `tf.keras`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ronde.frameworks.keras import callbacks
from ronde.tensorflow.keras.backend import backend as _backend

_Base: Any = tf.keras.callbacks.Callback


class BroadcastGlobalVariablesCallback(callbacks.BroadcastGlobalVariablesCallback, _Base):
    __doc__ = callbacks.BroadcastGlobalVariablesCallback.__doc__
    backend = _backend


class MetricAverageCallback(callbacks.MetricAverageCallback, _Base):
    __doc__ = callbacks.MetricAverageCallback.__doc__


class LearningRateScheduleCallback(callbacks.LearningRateScheduleCallback, _Base):
    __doc__ = callbacks.LearningRateScheduleCallback.__doc__


class LearningRateWarmupCallback(callbacks.LearningRateWarmupCallback, _Base):
    __doc__ = callbacks.LearningRateWarmupCallback.__doc__


class BestModelCheckpoint(callbacks.BestModelCheckpoint, tf.keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    __doc__ = callbacks.BestModelCheckpoint.__doc__

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: Any = "epoch",
    ) -> None:
        unset = callbacks.UNSET.replace(".keras", ".weights.h5") if save_weights_only else callbacks.UNSET
        super().__init__(
            filepath=unset,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = callbacks.UNSET
