"""Imports Keras 3. Raises ImportError that says what to do where it is not installed."""

try:
    import keras
except ModuleNotFoundError as error:
    if error.name != "keras":
        raise
    raise ImportError("this module needs Keras 3, which is not installed: pip install keras") from error

if not hasattr(keras, "backend") or not hasattr(keras, "ops"):
    raise ImportError(f"this module needs Keras 3, not {keras.__version__}; ronde.tensorflow.keras works with tf-keras")
