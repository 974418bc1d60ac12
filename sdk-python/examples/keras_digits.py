"""Keras 3 with `fit` on handwritten digits, on its back end TensorFlow or PyTorch.

ronde run -np 2 python keras_digits.py
KERAS_BACKEND=torch ronde run -np 2 python keras_digits.py
python keras_digits.py                         one process, on the same global batches
"""

from __future__ import annotations

import keras
from tensorflow_data import EPOCHS, GLOBAL_BATCH, model, report, split

import ronde.keras as hvd


def main() -> None:
    """Trains and reports."""
    hvd.init()
    (images, labels), test = split()
    # Different on each rank, so that the broadcast matters.
    keras.utils.set_random_seed(hvd.rank())
    digits = model()
    digits.compile(
        optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # On TensorFlow: XLA compiles no collectives for GPUs.
        jit_compile=False,
    )
    digits.fit(
        images[hvd.rank() :: hvd.size()],
        labels[hvd.rank() :: hvd.size()],
        batch_size=GLOBAL_BATCH // hvd.size(),
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1),
        ],
    )
    report(digits, test, hvd.rank(), hvd.size())
    hvd.shutdown()


if __name__ == "__main__":
    main()
