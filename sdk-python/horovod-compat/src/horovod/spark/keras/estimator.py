"""`KerasEstimator` and `KerasModel`."""

from ronde.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
