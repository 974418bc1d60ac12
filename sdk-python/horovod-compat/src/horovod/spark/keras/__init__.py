"""Estimators of Spark ML for Keras 3: Horovod's names for `ronde.spark.keras`."""

from ronde.spark.keras import Compression, KerasEstimator, KerasModel, callbacks

__all__ = ["Compression", "KerasEstimator", "KerasModel", "callbacks"]
