"""TensorFlow 2 with a gradient tape on handwritten digits.

ronde run -np 2 python tensorflow_digits.py
python tensorflow_digits.py                    one process, on the same global batches
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow_data import EPOCHS, GLOBAL_BATCH, model, report, split

import ronde.tensorflow as hvd


def main() -> None:
    """Trains and reports."""
    hvd.init()
    train, test = split()
    # A global batch has a share of each rank.
    dataset = tf.data.Dataset.from_tensor_slices(train).shard(hvd.size(), hvd.rank()).batch(GLOBAL_BATCH // hvd.size())
    # Different on each rank, so that the broadcast matters.
    tf.keras.utils.set_random_seed(hvd.rank())
    digits = model()
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(digits.trainable_variables)
    hvd.broadcast_variables([*digits.variables, *optimizer.variables], root_rank=0)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(labels, digits(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(value, digits.trainable_variables)
        optimizer.apply_gradients(zip(gradients, digits.trainable_variables))
        return value

    for _ in range(EPOCHS):
        for images, labels in dataset:
            step(images, labels)
    report(digits, test, hvd.rank(), hvd.size())
    hvd.shutdown()


if __name__ == "__main__":
    main()
