"""Predictions of a model of Keras in a task of Spark."""

from __future__ import annotations

from typing import Any

from ronde.spark.common.pickling import loads
from ronde.spark.keras import models
from ronde.spark.keras.batches import inputs_of, shapes_of

PREDICTED_ROWS = 1024
"""How many rows a model predicts at the same time."""


def predictor(content: bytes, known: bytes, features: list[str]) -> Any:
    """Returns a function from arrays by column to a list of arrays, one for each output.

    content  -- the model
    known    -- its custom objects, pickled
    features -- the columns that are its inputs
    """
    model = models.model_of(content, loads(known))
    shapes = shapes_of(model, len(features))

    def predict(columns: dict[str, Any]) -> list[Any]:
        outputs = model.predict(inputs_of(columns, features, shapes), batch_size=PREDICTED_ROWS, verbose=0)
        return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]

    return predict
