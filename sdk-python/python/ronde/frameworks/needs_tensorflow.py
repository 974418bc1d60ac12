"""Imports TensorFlow. Raises ImportError that says what to do where it is not installed."""

try:
    import tensorflow  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "tensorflow":
        raise
    raise ImportError("this module needs TensorFlow, which is not installed: pip install tensorflow") from error
