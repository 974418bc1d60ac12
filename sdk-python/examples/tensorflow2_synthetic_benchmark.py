"""Images per second of a model of Keras on random data, with the flags of Horovod's script of this name.

ronde run -np 2 python tensorflow2_synthetic_benchmark.py --model MobileNet --batch-size 8 --num-iters 3
"""

from __future__ import annotations

import argparse
import timeit

import numpy as np
import tensorflow as tf

import ronde.tensorflow as hvd


def main() -> None:
    """Measures and reports."""
    options = arguments()
    tf.config.run_functions_eagerly(options.eager)
    hvd.init()
    gpus = [] if options.no_cuda else tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    tf.config.set_visible_devices([gpus[hvd.local_rank()]] if gpus else [], "GPU")
    device = "GPU" if gpus else "CPU"
    model = getattr(tf.keras.applications, options.model)(weights=None)
    optimizer = tf.keras.optimizers.SGD(0.01)
    optimizer.build(model.trainable_variables)
    size = model.input_shape[1]
    data = tf.random.uniform([options.batch_size, size, size, 3])
    target = tf.random.uniform([options.batch_size], minval=0, maxval=999, dtype=tf.int64)
    compression = hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none
    loss = tf.keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            value = loss(target, model(data, training=True))
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    def log(text: str) -> None:
        if hvd.rank() == 0:
            print(text, flush=True)

    step()
    hvd.broadcast_variables([*model.variables, *optimizer.variables], root_rank=0)
    log(f"Model: {options.model}")
    log(f"Batch size: {options.batch_size}")
    log(f"Number of {device}s: {hvd.size()}")
    log("Running warmup...")
    timeit.timeit(step, number=options.num_warmup_batches)
    log("Running benchmark...")
    rates = []
    for number in range(options.num_iters):
        seconds = timeit.timeit(step, number=options.num_batches_per_iter)
        rates.append(options.batch_size * options.num_batches_per_iter / seconds)
        log(f"Iter #{number}: {rates[-1]:.1f} img/sec per {device}")
    mean, spread = np.mean(rates), 1.96 * np.std(rates)
    log(f"Img/sec per {device}: {mean:.1f} +-{spread:.1f}")
    log(f"Total img/sec on {hvd.size()} {device}(s): {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fp16-allreduce", action="store_true", help="reduce gradients in float16")
    parser.add_argument("--model", default="ResNet50", help="a name of tf.keras.applications")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--num-warmup-batches", type=int, default=10)
    parser.add_argument("--num-batches-per-iter", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=10)
    parser.add_argument("--eager", action="store_true", help="run without a graph")
    parser.add_argument("--no-cuda", action="store_true", help="do not use GPUs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
