"""Elastic training with Keras on handwritten digits: workers may die and come while it runs.

ronde run -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python keras_elastic_digits.py
ronde run -np 2 python keras_elastic_digits.py        a job with a fixed number of ranks

A worker prints a line when it begins and after each change, and at the end its accuracy and a digest of its weights.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import tensorflow as tf
from tensorflow_data import GLOBAL_BATCH, model, report, split

import ronde.tensorflow.keras as hvd


class Pause(tf.keras.callbacks.Callback):
    """Makes each step longer, and reports epochs."""

    def __init__(self, seconds: float, below: int | None, state: Any) -> None:
        super().__init__()
        self.seconds, self.below, self.state = seconds, below, state

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Waits, with `below` only while there are fewer ranks."""
        if self.below is None or hvd.size() < self.below:
            time.sleep(self.seconds)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Prints the number of complete epochs."""
        if hvd.rank() == 0:
            print(f"epoch {self.state.epoch} is complete", flush=True)


def main() -> None:
    """Trains and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="makes each step longer")
    parser.add_argument("--pause-below", type=int, metavar="RANKS", help="pauses only while there are fewer ranks")
    options = parser.parse_args()
    hvd.init()
    (images, labels), test = split()
    tf.keras.utils.set_random_seed(hvd.rank())
    digits = model()
    digits.compile(
        optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.05, momentum=0.9)),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        # XLA compiles no collectives for GPUs.
        jit_compile=False,
    )
    state = hvd.elastic.KerasState(digits, batch=0, epoch=0)
    state.register_reset_callbacks([lambda: announce("continues")])

    @hvd.elastic.run
    def train(state: Any) -> None:
        mine = slice(hvd.rank(), len(labels) // hvd.size() * hvd.size(), hvd.size())
        if state.epoch >= options.epochs:
            return
        digits.fit(
            images[mine],
            labels[mine],
            batch_size=max(1, GLOBAL_BATCH // hvd.size()),
            # The same on all ranks.
            steps_per_epoch=len(labels) // hvd.size() // max(1, GLOBAL_BATCH // hvd.size()),
            # After a restart `fit` continues with the number of the epoch that was interrupted.
            initial_epoch=state.epoch,
            epochs=options.epochs,
            shuffle=False,
            verbose=0,
            callbacks=[
                hvd.elastic.CommitStateCallback(state, batches_per_commit=5),
                hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.UpdateEpochStateCallback(state),
                Pause(options.pause, options.pause_below, state),
            ],
        )

    announce("begins")
    train(state)
    report(digits, test, hvd.rank(), hvd.size())
    hvd.shutdown()


def announce(what: str) -> None:
    """Prints that this worker begins or continues, with its rank."""
    worker = os.environ.get("RONDE_WORKER", hvd.rank())
    print(f"worker {worker} (pid {os.getpid()}) {what} as rank {hvd.rank()} of {hvd.size()}", flush=True)


if __name__ == "__main__":
    main()
