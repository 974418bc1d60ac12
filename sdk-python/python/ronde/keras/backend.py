"""What the calls for Keras 3 need of its back end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy

from ronde.frameworks import process_sets, world

if TYPE_CHECKING:
    from collections.abc import Iterable

NAME: str = keras.backend.backend()
"""The back end: "tensorflow", "torch", "jax" or "numpy"."""


class AnyBackend:
    """Variables of any back end, through main memory."""

    @staticmethod
    def broadcast_variables(variables: Iterable[Any], root_rank: int) -> Any:
        """Assigns the values of a rank to variables. Raises ValueError on all ranks if lists differ."""
        client = world.current().client
        members = process_sets.members_of(process_sets.global_process_set)
        root = process_sets.root_of(root_rank, process_sets.global_process_set)
        listed = list(variables)
        mine = [[keras.backend.standardize_dtype(each.dtype), list(each.shape)] for each in listed]
        everybodys = process_sets.exchanged(client, mine, "keras.variables", members)
        for rank, other in enumerate(everybodys):
            if other != everybodys[0]:
                raise ValueError(
                    f"rank {rank} has other variables than rank 0: {other} and {everybodys[0]}. Give the same "
                    "variables on all ranks, after the model is built"
                )
        for index, variable in enumerate(listed):
            # Of a scalar this makes an array of one dimension.
            value = numpy.ascontiguousarray(keras.ops.convert_to_numpy(variable))
            # Bytes, because collectives do not accept all types of Keras.
            content = value.reshape(-1).view(numpy.uint8)
            received = client.broadcast(content, root, f"keras.variables.{index}", process_set=members)
            variable.assign(numpy.asarray(received).view(value.dtype).reshape(tuple(variable.shape)))

    @staticmethod
    def reference(variable: Any) -> Any:
        """Returns the object by which a variable is the same: itself."""
        return variable

    @staticmethod
    def value_of(variable: Any) -> Any:
        """Returns the value of a variable: a number or an array."""
        return keras.ops.convert_to_numpy(variable)

    @staticmethod
    def multiply(variable: Any, factor: float) -> None:
        """Multiplies a variable in place."""
        variable.assign(variable * factor)

    @staticmethod
    def is_variable(given: Any) -> bool:
        """Whether an object is a variable of Keras."""
        return isinstance(given, keras.Variable)


def _backend() -> Any:
    if NAME == "tensorflow":
        from ronde.tensorflow.keras.backend import backend as tensorflow_backend

        return tensorflow_backend
    return AnyBackend()


backend = _backend()
"""The one of this process. Keras fixes its back end when it is imported."""
