"""Gluon on scikit-learn's handwritten digits: `ronde run -np 2 python mxnet_digits.py [--epochs N]`.

Each rank trains on its share of the images. Rank 0 prints the accuracy on the others at the end.
"""

from __future__ import annotations

import argparse

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

import ronde.mxnet as hvd

BATCH, TEST_SHARE = 32, 5


def main() -> None:
    """Trains and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=5)
    epochs = parser.parse_args().epochs
    hvd.init()
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype("float32")
    is_test = np.arange(len(images)) % TEST_SHARE == 0
    # The ranks' shares have the same length, so all make the same number of steps.
    mine = np.flatnonzero(~is_test)
    mine = mine[: len(mine) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(64, activation="relu", in_units=64), gluon.nn.Dense(10, in_units=64))
    # Different on each rank, so that the broadcast matters.
    mx.random.seed(hvd.rank())
    net.initialize(mx.init.Xavier())
    net.hybridize()
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.003})
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    shuffled = np.random.default_rng(7)
    for _ in range(epochs):
        order = mine[shuffled.permutation(len(mine))]
        for start in range(0, len(order) - BATCH + 1, BATCH):
            batch = order[start : start + BATCH]
            with autograd.record():
                loss = loss_fn(net(mx.nd.array(images[batch])), mx.nd.array(labels[batch]))
            loss.backward()
            trainer.step(BATCH)
    if hvd.rank() == 0:
        found = net(mx.nd.array(images[is_test])).argmax(axis=1).asnumpy()
        print(f"accuracy after {epochs} epochs: {(found == labels[is_test]).mean():.3f}")


if __name__ == "__main__":
    main()
