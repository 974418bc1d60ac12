"""What the examples for TensorFlow and Keras share: the digits, a model, and the report."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

GLOBAL_BATCH = 32
EPOCHS = 6
SEED = 0

Split = tuple[np.ndarray, np.ndarray]


def split() -> tuple[Split, Split]:
    """Returns 1,408 images of 8 x 8 and their labels, in whole global batches, and 360 more to test with."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(labels))
    images, labels = (images[order] / 16).astype("float32"), labels[order].astype("int32")
    count = (len(labels) - 360) // GLOBAL_BATCH * GLOBAL_BATCH
    return (images[:count], labels[:count]), (images[-360:], labels[-360:])


def model() -> Any:
    """Returns a perceptron of Keras for the digits."""
    import keras

    layers = keras.layers
    return keras.Sequential([layers.Input((64,)), layers.Dense(64, activation="relu"), layers.Dense(10)])


def report(digits: Any, test: Split, rank: int, size: int) -> None:
    """Prints the accuracy, and a digest of the weights, which is the same on all ranks."""
    images, labels = test
    accuracy = float((np.asarray(digits.predict(images, verbose=0)).argmax(1) == labels).mean())
    content = b"".join(np.ascontiguousarray(weight).tobytes() for weight in digits.get_weights())
    digest = hashlib.sha256(content).hexdigest()[:16]
    print(f"rank {rank} of {size}: test accuracy {accuracy:.3f}, weights {digest}", flush=True)
