"""The program of a rank of `ronde bench keras`: it trains the perceptron by `fit` of Keras, in the requested mode.

The benchmark starts it: `python3 -m ronde.bench.keras_rank --control SOCKET --backend ronde --batch 64`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from typing import Any, Callable

import numpy
import tensorflow as tf

from ronde.bench.control import Channel

FIT, BARRIER, ALONE = "fit", "barrier", "alone"
WIDTHS = (1024, 3072, 3072, 3072, 1024, 10)
RATE = 0.01
# Values of each weight that are compared between backends.
SAMPLES = 64


class Rank:
    """The models of one rank, one for each mode.

    make -- returns a compiled model of a mode
    rank, ranks -- this rank and their number
    """

    def __init__(self, rank: int, ranks: int, batch: int, seed: int, make: Callable[[str], Any]) -> None:
        self.rank, self.ranks, self.batch, self.seed = rank, ranks, batch, seed
        self._make = make
        self._models: dict[str, Any] = {}

    def steps(self, mode: str, steps: int, after: Callable[[], Any] | None, global_batch: int) -> list[int]:
        """Runs `fit` for so many steps after an untimed one. Returns the nanoseconds of each.

        after        -- is called after each step, as a part of it
        global_batch -- the rows of a step that `fit` takes
        """
        if mode not in self._models:
            self._models[mode] = self._make(mode)
        clock = _Clock(after)
        self._models[mode].fit(
            self._rows(steps + 1, global_batch), steps_per_epoch=steps + 1, verbose=0, callbacks=[clock]
        )
        return [later - earlier for earlier, later in zip(clock.times, clock.times[1:])]

    def sampled(self, mode: str) -> list[list[float]]:
        """Returns some values of each weight."""
        weights = self._models[mode].get_weights()
        return [weight.reshape(-1)[:: max(1, weight.size // SAMPLES)].astype(float).tolist() for weight in weights]

    def _rows(self, steps: int, global_batch: int) -> Any:
        generator = numpy.random.default_rng([self.seed, self.rank])
        # A rank takes its own share of a global batch.
        rows = generator.random((steps * self.batch, WIDTHS[0]), dtype=numpy.float32)
        labels = generator.integers(0, WIDTHS[-1], steps * self.batch)
        repeated = tf.data.Dataset.from_tensor_slices((rows, labels)).repeat()
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        return repeated.batch(global_batch, drop_remainder=True).with_options(options)


class _Clock(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Notes when each step ends."""

    def __init__(self, after: Callable[[], Any] | None) -> None:
        super().__init__()
        self.after = after
        self.times: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Notes the time."""
        del batch, logs
        if self.after is not None:
            self.after()
        self.times.append(time.perf_counter_ns())


def perceptron(optimizer: Any, seed: int) -> Any:
    """Returns a compiled perceptron of 25 million parameters, the same on all ranks."""
    layers = [tf.keras.layers.Dense(width, "relu") for width in WIDTHS[1:-1]]
    model = tf.keras.Sequential([tf.keras.Input((WIDTHS[0],)), *layers, tf.keras.layers.Dense(WIDTHS[-1])])
    generator = numpy.random.default_rng(seed)
    model.set_weights(
        [
            generator.normal(0, (2 / weight.shape[0]) ** 0.5, weight.shape) if weight.ndim > 1 else weight
            for weight in model.get_weights()
        ]
    )
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, jit_compile=False)
    return model


def _of_ronde(options: argparse.Namespace) -> tuple[Rank, Callable[[str, int], list[int]], dict[str, str]]:
    import ronde.tensorflow.keras as hvd

    hvd.init()
    client = hvd.client()

    def make(mode: str) -> Any:
        optimizer = tf.keras.optimizers.SGD(RATE)
        return perceptron(hvd.DistributedOptimizer(optimizer) if mode == FIT else optimizer, options.seed)

    rank = Rank(hvd.rank(), hvd.size(), options.batch, options.seed, make)

    def steps(mode: str, count: int) -> list[int]:
        after = client.barrier if mode == BARRIER else None
        return rank.steps(mode, count, after, options.batch)

    return rank, steps, {}


def _of_mirrored(options: argparse.Namespace) -> tuple[Rank, Callable[[str, int], list[int]], dict[str, str]]:
    implementation = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=implementation)
    )

    def make(mode: str) -> Any:
        del mode
        with strategy.scope():
            return perceptron(tf.keras.optimizers.SGD(RATE), options.seed)

    rank = Rank(options.rank, options.ranks, options.batch, options.seed, make)
    return rank, lambda mode, count: rank.steps(mode, count, None, options.batch * options.ranks), {}


def main() -> int:
    """Executes commands until the benchmark ends. Returns the process's exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--control", required=True, metavar="SOCKET")
    parser.add_argument("--backend", required=True, choices=["ronde", "mirrored"])
    parser.add_argument("--batch", required=True, type=int)
    parser.add_argument("--seed", required=True, type=int)
    parser.add_argument("--rank", type=int, help="the rank, for MultiWorkerMirroredStrategy")
    parser.add_argument("--ranks", type=int)
    options = parser.parse_args()
    channel = Channel.connect(options.control)
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    try:
        connect = _of_ronde if options.backend == "ronde" else _of_mirrored
        rank, steps, versions = connect(options)
        versions = {**versions, "tensorflow": tf.__version__, "keras": getattr(tf.keras, "__version__", "2")}
        channel.send({"rank": rank.rank, "pid": os.getpid(), "versions": versions})
        while (command := channel.receive()) is not None and command["do"] != "end":
            if command["do"] == "steps":
                channel.send({"nanoseconds": steps(command["mode"], command["steps"])})
            else:
                channel.send({"weights": rank.sampled(command["mode"])})
    except Exception as error:
        traceback.print_exc()
        channel.send({"error": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
