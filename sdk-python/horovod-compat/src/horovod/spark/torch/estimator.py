"""`TorchEstimator` and `TorchModel`."""

from ronde.spark.torch.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
