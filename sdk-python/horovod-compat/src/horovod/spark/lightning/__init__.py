"""Estimators of Spark ML for Lightning: Horovod's names for `ronde.spark.lightning`."""

from ronde.spark.lightning import Compression, LightningEstimator, LightningModel, TorchEstimator, TorchModel

__all__ = ["Compression", "LightningEstimator", "LightningModel", "TorchEstimator", "TorchModel"]
