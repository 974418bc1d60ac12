"""Runs blocks about estimators of Horovod's documentation in one namespace, with the names that they assume.

The block that makes the model is left out: it is no valid Python, and its argument `lr` is gone from Keras. HDFS is not
there, so the name HDFSStore is a store whose paths are below a local folder; the stores' own paths have tests.
"""

from __future__ import annotations

import pathlib
from typing import Any

import horovod.spark.keras as hvd
import keras
import numpy as np
from horovod.spark.common import util
from horovod.spark.common.store import DBFSLocalStore, LocalStore, Store

SEEDS = pathlib.Path(__file__).parent / "seeds"


def namespace(spark: Any, folder: pathlib.Path) -> dict[str, Any]:
    """The names that the blocks assume."""
    keras.utils.set_random_seed(0)
    points = np.random.default_rng(0).random((64, 2))
    df = spark.createDataFrame([(row.tolist(), int(row[0] > row[1])) for row in points], ["features", "y"])
    layers = [keras.layers.Dense(8), keras.layers.Activation("tanh"), keras.layers.Dense(1)]
    layers.append(keras.layers.Activation("sigmoid"))
    return {
        "hvd": hvd,
        "np": np,
        "util": util,
        "model": keras.Sequential([keras.layers.Input((2,)), *layers]),
        # NOTE of the documentation: unscaled learning rate
        "optimizer": keras.optimizers.SGD(0.1),
        "loss": "binary_crossentropy",
        "HDFSStore": lambda *args, **paths: below(folder, *args, **paths),
        "Store": Store,
        "DBFSLocalStore": DBFSLocalStore,
        "dbfs_path": "dbfs:/experiments",
        "df": df,
        "train_df": df,
        "test_df": df.limit(4),
    }


def below(folder: pathlib.Path, *args: str, **paths: str) -> LocalStore:
    """A store for paths of HDFS below a local folder."""
    return LocalStore(
        *[f"{folder}{path}" for path in args], **{name: f"{folder}{path}" for name, path in paths.items()}
    )


def run(names: dict[str, Any], *blocks: str, ranks: int) -> None:
    """Runs blocks, with another number of processes than the documentation's 4, and fewer epochs."""
    for block in blocks:
        path = SEEDS / f"{block}.txt"
        text = (
            path.read_text()
            .replace("num_proc=4", f"num_proc={ranks}")
            .replace("num_processes=4", f"num_processes={ranks}")
        )
        exec(compile(text.replace("epochs=10", "epochs=1"), path, "exec"), names)
