"""`TorchEstimator` and `TorchModel` of Lightning."""

from ronde.spark.lightning import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
