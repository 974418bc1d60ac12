"""Imports Keras 3. Raises ImportError that says what to do where it is not installed."""

from ronde.frameworks.requirement import require

require("keras", "Keras 3")

import keras  # noqa: E402

if not hasattr(keras, "backend") or not hasattr(keras, "ops"):
    raise ImportError(f"this module needs Keras 3, not {keras.__version__}; ronde.tensorflow.keras works with tf-keras")
