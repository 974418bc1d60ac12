"""The parameters of estimators and their models."""

from ronde.spark.common.params import EstimatorParams, ModelParams

__all__ = ["EstimatorParams", "ModelParams"]
