"""An elastic `fit` of Keras on JAX: worker 1 dies in the second epoch, and the others continue from their commit."""

from __future__ import annotations

import os
from typing import Any

import keras
import numpy as np
import ronde.keras as hvd

STEPS, EPOCHS = 8, 4
hvd.init()
rows = np.random.default_rng(1).normal(size=(STEPS * 4, 6)).astype("float32")
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), loss="mse")
state = hvd.elastic.KerasState(model, batch=0, epoch=0)
resets: list[int] = []
state.register_reset_callbacks([lambda: resets.append(state.epoch)])


class Dies(keras.callbacks.Callback):
    """Ends the process of worker 1 after the commit of the second epoch's fourth batch."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if state.epoch == 1 and batch == 5 and os.environ.get("RONDE_WORKER") == "1":
            os._exit(9)


@hvd.elastic.run
def train(state: Any) -> None:
    if state.epoch < EPOCHS:
        model.fit(
            rows,
            rows.sum(1),
            batch_size=4,
            epochs=EPOCHS - state.epoch,
            shuffle=False,
            verbose=0,
            callbacks=[
                hvd.elastic.CommitStateCallback(state, batches_per_commit=4),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                Dies(),
            ],
        )


train(state)
assert state.epoch == EPOCHS, state.epoch
everybodys = hvd.client().allgather(model.get_weights()[0][None])
assert all((each == everybodys[0]).all() for each in everybodys)
assert float(np.mean((model.predict(rows, verbose=0)[:, 0] - rows.sum(1)) ** 2)) < 2.0
if os.environ.get("RONDE_WORKER") == "0":
    assert resets[0] == 1, resets
print(f"rank {hvd.rank()}: continued from the commit", flush=True)
hvd.shutdown()
