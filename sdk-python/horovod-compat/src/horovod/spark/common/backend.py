"""What runs the training function of an estimator."""

from ronde.spark.common.backend import Backend, SparkBackend, default_num_proc

__all__ = ["Backend", "SparkBackend", "default_num_proc"]
