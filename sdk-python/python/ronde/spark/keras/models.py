"""Models, optimizers, losses and metrics of Keras 3 as bytes and configurations, without pickling them."""

from __future__ import annotations

import io
import json
import os
import tempfile
import zipfile
from typing import TYPE_CHECKING, Any

import keras
import numpy

from ronde.spark.common.pickling import unpicklable

if TYPE_CHECKING:
    from collections.abc import Sequence

STATE, OPTIMIZER = "ronde/state.json", "ronde/optimizer.npz"
"""Further members of the zip file that a checkpoint is. Keras ignores them."""

_KERAS_OBJECTS = (keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer)


def model_bytes(model: Any) -> bytes:
    """Returns a model in the format `.keras`. Raises TypeError if it cannot be saved."""
    with tempfile.TemporaryDirectory(prefix="ronde-keras-") as folder:
        path = os.path.join(folder, "model.keras")
        try:
            model.save(path)
        except Exception as error:
            raise TypeError(unpicklable("the model", model, error)) from error
        with open(path, "rb") as file:
            return file.read()


def model_of(content: bytes, custom_objects: dict[str, Any] | None = None) -> Any:
    """Returns the model of `model_bytes`, or of a checkpoint, not compiled.

    custom_objects -- classes and functions that are not Keras' own, by name

    Raises what `keras.models.load_model` does, for example for a class that is not in `custom_objects`.
    """
    with tempfile.TemporaryDirectory(prefix="ronde-keras-") as folder:
        path = os.path.join(folder, "model.keras")
        with open(path, "wb") as file:
            file.write(content)
        return keras.models.load_model(path, custom_objects=custom_objects, compile=False)


def needs_loss_scale(model: Any) -> bool:
    """Returns whether layers of a model compute in float16, in which small gradients become zeros."""
    return any(each.dtype_policy.name == "mixed_float16" for each in model._flatten_layers())


def known_objects(custom_objects: dict[str, Any] | None) -> dict[str, Any]:
    """Returns custom objects, and those that the program has registered with Keras."""
    return {**keras.saving.get_custom_objects(), **(custom_objects or {})}


def compiled_with(model: Any, names: Sequence[str], custom_objects: dict[str, Any] | None) -> dict[str, Any]:
    """Returns arguments of `compile` that a compiled model was given, such as "metrics", as new objects.

    names          -- of the arguments
    custom_objects -- classes and functions that are not Keras' own, by name

    Raises ValueError with the argument's name if it cannot be made from the model's configuration.
    """
    try:
        config = model.get_compile_config()
    except Exception as error:
        raise ValueError(
            f"loss is not set, and what the model was compiled with cannot be read ({type(error).__name__}: {error}); "
            "give loss, loss_weights and metrics to the estimator"
        ) from error
    found = {}
    for name in names:
        try:
            found[name] = keras.saving.deserialize_keras_object(config.get(name), custom_objects=custom_objects)
        except Exception as error:
            raise ValueError(
                f"loss is not set, and {name} of the compiled model cannot be made again ({type(error).__name__}: "
                f"{error}); give its classes and functions in custom_objects, or give loss and {name} to the estimator"
            ) from error
    return found


def packed(value: Any) -> Any:
    """Returns losses, metrics and optimizers of Keras as their configurations, in lists and dictionaries, too."""
    if isinstance(value, _KERAS_OBJECTS):
        return _Config(keras.saving.serialize_keras_object(value))
    if isinstance(value, (list, tuple)):
        return [packed(each) for each in value]
    if isinstance(value, dict):
        return {key: packed(each) for key, each in value.items()}
    return value


def unpacked(value: Any, custom_objects: dict[str, Any] | None) -> Any:
    """Returns the objects of `packed`."""
    if isinstance(value, _Config):
        return keras.saving.deserialize_keras_object(value.config, custom_objects=custom_objects)
    if isinstance(value, list):
        return [unpacked(each, custom_objects) for each in value]
    if isinstance(value, dict):
        return {key: unpacked(each, custom_objects) for key, each in value.items()}
    return value


class _Config:
    def __init__(self, config: Any) -> None:
        self.config = config


def with_state(content: bytes, optimizer: Any, state: dict[str, Any]) -> bytes:
    """Returns a model's bytes with the variables of its optimizer, and numbers, as further members of the file."""
    arrays = io.BytesIO()
    variables = {f"v{index}": numpy.asarray(variable) for index, variable in enumerate(optimizer.variables)}
    numpy.savez(arrays, **variables)  # type: ignore[arg-type]
    changed = io.BytesIO(content)
    with zipfile.ZipFile(changed, "a") as file:
        file.writestr(STATE, json.dumps(state))
        file.writestr(OPTIMIZER, arrays.getvalue())
    return changed.getvalue()


def state_of(content: bytes) -> tuple[dict[str, Any], list[Any]]:
    """Returns the numbers and the optimizer's variables of a checkpoint; none of a file that has only the model."""
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        if STATE not in file.namelist():
            return {}, []
        with numpy.load(io.BytesIO(file.read(OPTIMIZER)), allow_pickle=False) as arrays:
            variables = [arrays[f"v{index}"] for index in range(len(arrays.files))]
        return json.loads(file.read(STATE)), variables


def set_variables(optimizer: Any, model: Any, values: list[Any]) -> None:
    """Assigns the variables of an optimizer. Raises ValueError for a checkpoint of another optimizer."""
    optimizer.build(model.trainable_variables)
    variables = list(optimizer.variables)
    if len(variables) != len(values):
        raise ValueError(
            f"the checkpoint has {len(values)} variables of its optimizer, but this one has {len(variables)}; use the "
            "optimizer of that run, or another run_id"
        )
    for variable, value in zip(variables, values):
        variable.assign(value)
