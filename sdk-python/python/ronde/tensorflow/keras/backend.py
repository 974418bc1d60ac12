"""What the callbacks of Keras need of TensorFlow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ronde.tensorflow import functions
from ronde.tensorflow.reduction import reference

if TYPE_CHECKING:
    from collections.abc import Iterable


class TensorFlowBackend:
    """Variables of TensorFlow."""

    @staticmethod
    def broadcast_variables(variables: Iterable[Any], root_rank: int) -> Any:
        """Assigns the values of a rank to variables."""
        done = functions.broadcast_variables(variables, root_rank)
        if done is not None and not tf.executing_eagerly():
            tf.compat.v1.keras.backend.get_session().run(done)

    @staticmethod
    def reference(variable: Any) -> Any:
        """Returns the object by which a variable is the same: for one of Keras 3 that of TensorFlow inside."""
        return reference(variable)

    @staticmethod
    def value_of(variable: Any) -> Any:
        """Returns the value of a variable: a number or an array."""
        if tf.executing_eagerly():
            return variable.numpy()
        return tf.compat.v1.keras.backend.get_session().run(variable)

    def multiply(self, variable: Any, factor: float) -> None:
        """Multiplies a variable in place."""
        if tf.executing_eagerly():
            variable.assign(variable * factor)
        else:
            tf.compat.v1.keras.backend.set_value(variable, self.value_of(variable) * factor)

    @staticmethod
    def is_variable(given: Any) -> bool:
        """Whether an object is a variable of TensorFlow or Keras 3."""
        return isinstance(given, tf.Variable) or isinstance(getattr(given, "_value", None), tf.Variable)


backend = TensorFlowBackend()
