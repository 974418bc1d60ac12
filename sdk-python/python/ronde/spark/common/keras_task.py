"""What tasks of Spark call for models of Keras.

It is apart from `ronde.spark.keras`, which imports Keras: the back end is chosen before.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ronde.spark.common.task import Task


def train(task: Task) -> Any:
    """Trains on this rank, with the back end and the floating-point type of Keras that the driver has.

    Returns what `training.train` does.
    Raises RuntimeError if the process has imported Keras with another back end before.
    """
    use_backend(task.payload["keras_backend"], task.payload["floatx"])
    from ronde.spark.keras.training import train as train_model

    return train_model(task)


def predictor(backend: str, floatx: str, content: bytes, known: bytes, features: list[str]) -> Any:
    """Returns a function that predicts.

    backend  -- of Keras in the driver
    floatx   -- the name of Keras' floating-point type in training, such as "float32"
    content  -- the model
    known    -- its custom objects, pickled
    features -- the columns that are its inputs
    """
    use_backend(backend, floatx)
    from ronde.spark.keras.prediction import predictor as predictor_of_model

    return predictor_of_model(content, known, features)


def use_backend(name: str, floatx: str) -> None:
    """Makes Keras use a back end, "tensorflow" or "torch", and a floating-point type, such as "float32".

    Raises RuntimeError if it uses another back end already.
    """
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = name
    import keras

    if keras.backend.backend() != name:
        raise RuntimeError(
            f"Keras uses the back end {keras.backend.backend()!r} in this process, but {name!r} in the driver; set "
            f"KERAS_BACKEND={name} for the executors (spark.executorEnv.KERAS_BACKEND)"
        )
    keras.config.set_floatx(floatx)
