"""Estimators of Spark ML for PyTorch: Horovod's names for `ronde.spark.torch`."""

from ronde.spark.torch import Compression, TorchEstimator, TorchModel

__all__ = ["Compression", "TorchEstimator", "TorchModel"]
