"""Run by every rank: a program of the documentation of Horovod, with the names that it assumes: `mxnet_seeds.py FILE`.

There is no GPU, so `mxnet.gpu` is the processor. `NAME = ...` in the program represents what a reader has.
"""

from __future__ import annotations

import pathlib
import re
import sys
from typing import Any

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np

BATCH, FEATURES = 4, 3


def names() -> dict[str, Any]:
    """What a reader has; the weights and the samples differ from rank to rank."""
    hvd.init()
    mx.gpu = lambda device=0: mx.cpu()
    mx.random.seed(hvd.rank())
    random = np.random.default_rng(hvd.rank())
    data = random.standard_normal((BATCH * 5, FEATURES)).astype("float32")
    model = mx.gluon.nn.Dense(1, in_units=FEATURES, prefix="seed_")
    return {
        "__name__": "__main__",
        "make_model": lambda: model,
        "model": model,
        "make_loss": mx.gluon.loss.L2Loss,
        "loss_fn": mx.gluon.loss.L2Loss(),
        "optimizer_params": {"learning_rate": 0.05},
        "initializer": mx.init.Normal(1.0),
        "num_epoch": 3,
        "train_data": mx.io.NDArrayIter(data, data.sum(axis=1, keepdims=True), BATCH),
        "dtype": "float32",
        "batch_size": BATCH,
    }


def main() -> None:
    path = pathlib.Path(sys.argv[1])
    # What the documentation leaves to the reader keeps its value from `names`.
    text = re.sub(r"(?m)^(\w+) = \.\.\.$", r"\1 = \1", path.read_text())
    given = names()
    exec(compile(text, path, "exec"), given)
    weights = given["model"].weight.data().asnumpy().tobytes()
    assert len(set(hvd.allgather_object(weights))) == 1, "ranks have different weights"
    loss = float(given["loss"].mean().asscalar())
    assert loss < 1.0, loss
    print(f"program {path.stem}: ran on rank {hvd.rank()}", flush=True)


if __name__ == "__main__":
    main()
