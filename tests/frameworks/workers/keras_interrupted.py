"""A `fit` that is interrupted goes on with the weights of that moment, where the optimizer averages them, too."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import ronde.keras as hvd

hvd.init()
rows = np.random.default_rng(1).normal(size=(32, 6)).astype("float32")
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
sgd = keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.9)
model.compile(optimizer=hvd.DistributedOptimizer(sgd), loss="mse")
state = hvd.elastic.KerasState(model)
found: list[Any] = []


class Interrupts(keras.callbacks.Callback):
    """Notes the weights of the sixth batch, after which the hosts have changed."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch != 5:
            return
        state.save()
        found.extend([*model.get_weights(), *[np.array(each) for each in model.optimizer.variables]])
        state.on_hosts_updated(1.0, 2)
        state.check_host_updates()


def values() -> list[Any]:
    return [*model.get_weights(), *[np.array(each) for each in model.optimizer.variables]]


try:
    model.fit(rows, rows.sum(1), batch_size=4, shuffle=False, verbose=0, callbacks=[Interrupts()])
    raise AssertionError("fit was not interrupted")
except hvd.elastic.HostsUpdatedInterrupt:
    pass
state.on_reset()
assert all(np.array_equal(a, b) for a, b in zip(found, values())), "the weights are those of the averages"
# A failure after it restores the commit, not the interrupted values.
state.restore()
model.set_weights([each * 0 for each in model.get_weights()])
state.on_reset()
assert not model.get_weights()[0].any(), "an interrupt counts once"
print(f"rank {hvd.rank()}: continued with its weights", flush=True)
hvd.shutdown()
