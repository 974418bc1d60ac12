"""Estimators of Spark ML for Lightning: `horovod.spark.lightning` on ronde.

import ronde.spark.lightning as hvd

estimator = hvd.LightningEstimator(num_proc=4, store=store, model=lightning_module, ...)
predictions = estimator.fit(train_df).transform(test_df)
"""

try:
    import lightning  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError("ronde.spark.lightning needs Lightning, which is not installed: pip install lightning") from error

from ronde.spark.lightning.estimator import LightningEstimator, LightningModel
from ronde.torch import Compression

TorchEstimator = LightningEstimator
"""LightningEstimator, under Horovod's name."""
TorchModel = LightningModel
"""LightningModel, under Horovod's name."""

__all__ = ["Compression", "LightningEstimator", "LightningModel", "TorchEstimator", "TorchModel"]
