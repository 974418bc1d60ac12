"""Data-parallel training on scikit-learn's handwritten digits in plain JAX, without an optimizer's library.

    ronde run -np 2 python jax_digits.py        two workers with disjoint shares of each batch
    python jax_digits.py                        a single process, on the same batches

Each rank prints its test accuracy and a digest of its weights, which are the same on all ranks.
"""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy
from sklearn.datasets import load_digits

import ronde.jax as hvd

EPOCHS, BATCH, TEST_IMAGES = 20, 64, 360
RATE, MOMENTUM = 0.05, 0.9
LAYERS = (64, 128, 10)

Parameters = list[dict[str, jax.Array]]


def start(key: Any) -> Parameters:
    """Returns random weights."""
    layers = []
    for inputs, outputs in zip(LAYERS, LAYERS[1:]):
        key, own = jax.random.split(key)
        scale = (2 / inputs) ** 0.5
        layers.append({"weight": scale * jax.random.normal(own, (inputs, outputs)), "bias": jnp.zeros(outputs)})
    return layers


def scores(parameters: Parameters, images: jax.Array) -> jax.Array:
    """Returns scores of the ten digits."""
    for layer in parameters[:-1]:
        images = jax.nn.relu(images @ layer["weight"] + layer["bias"])
    return images @ parameters[-1]["weight"] + parameters[-1]["bias"]


def loss(parameters: Parameters, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(scores(parameters, images)), labels[:, None], axis=1)
    return -jnp.mean(chosen)


@jax.jit
def step(parameters: Parameters, velocity: Any, images: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
    """One step on this rank's share of a batch; returns the loss over all ranks."""
    value, gradients = hvd.value_and_grad(loss)(parameters, images, labels)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, gradients)
    parameters = jax.tree.map(lambda p, v: p - RATE * v, parameters, velocity)
    return parameters, velocity, hvd.allreduce(value, name="loss")


def split() -> tuple[Any, Any, Any, Any]:
    """Returns images of 64 numbers from 0 to 1, their labels, and which of them are for the test and for training."""
    digits = load_digits()
    order = numpy.random.default_rng(0).permutation(len(digits.target))
    images, labels = digits.data[order].astype("float32") / 16.0, digits.target[order].astype("int32")
    return images, labels, slice(0, TEST_IMAGES), numpy.arange(TEST_IMAGES, len(labels))


def report(parameters: Parameters, images: Any, labels: Any) -> None:
    """Prints the accuracy, a digest of the weights and their norm."""
    accuracy = float(jnp.mean(jnp.argmax(scores(parameters, images), axis=1) == labels))
    leaves = [numpy.asarray(leaf) for leaf in jax.tree.leaves(parameters)]
    digest = hashlib.sha256(b"".join(leaf.tobytes() for leaf in leaves)).hexdigest()[:12]
    norm = float(numpy.sqrt(sum((leaf.astype("float64") ** 2).sum() for leaf in leaves)))
    print(
        f"rank {hvd.rank()} of {hvd.size()}: test accuracy {accuracy:.4f}, weights {digest}, norm {norm:.4f}",
        flush=True,
    )


def main() -> None:
    """Trains and reports."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    if BATCH % size:
        raise SystemExit(f"a batch of {BATCH} images cannot be split among {size} ranks evenly")
    images, labels, test, train = split()
    # Different on each rank, so that the broadcast matters.
    parameters = hvd.broadcast_parameters(start(jax.random.key(rank)))
    velocity = jax.tree.map(jnp.zeros_like, parameters)
    for epoch in range(EPOCHS):
        shuffled = numpy.random.default_rng(epoch).permutation(train)
        for first in range(0, len(shuffled) - BATCH + 1, BATCH):
            mine = shuffled[first : first + BATCH][rank::size]
            parameters, velocity, mean = step(parameters, velocity, images[mine], labels[mine])
        if rank == 0:
            print(f"epoch {epoch + 1:2}  loss {float(mean):.4f}", flush=True)
    report(parameters, images[test], labels[test])
    hvd.shutdown()


if __name__ == "__main__":
    main()
