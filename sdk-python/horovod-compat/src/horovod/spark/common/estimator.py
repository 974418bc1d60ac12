"""The base classes of estimators and of the transformers that they return."""

from ronde.spark.common.estimator import HorovodEstimator, HorovodModel

__all__ = ["HorovodEstimator", "HorovodModel"]
