"""Rank 1 dies inside `fit`. The other rank's `fit` raises an error that names it."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import ronde.keras as hvd
import tensorflow as tf

hvd.init()


class Dies(keras.callbacks.Callback):
    """Ends the process of rank 1 in the middle of an epoch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 3 and hvd.rank() == 1:
            os._exit(9)


model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), loss="mse")
try:
    model.fit(np.ones((64, 4)), np.ones(64), batch_size=2, callbacks=[Dies()], verbose=0)
except (tf.errors.OpError, hvd.HorovodInternalError) as error:
    text = " ".join(str(error).split())
    print(f"fit raised {type(error).__name__}: {text}", flush=True)
