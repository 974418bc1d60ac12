"""Estimators of Spark ML for Lightning: `horovod.spark.lightning` on ronde.

import ronde.spark.lightning as hvd

estimator = hvd.LightningEstimator(num_proc=4, store=store, model=lightning_module, ...)
predictions = estimator.fit(train_df).transform(test_df)
"""

from ronde.frameworks.requirement import require

# First, for their errors.
require("torch", "PyTorch")
require("lightning", "Lightning")

from ronde.spark.lightning.estimator import LightningEstimator, LightningModel  # noqa: E402
from ronde.torch import Compression  # noqa: E402

TorchEstimator = LightningEstimator
"""LightningEstimator, under Horovod's name."""
TorchModel = LightningModel
"""LightningModel, under Horovod's name."""

__all__ = ["Compression", "LightningEstimator", "LightningModel", "TorchEstimator", "TorchModel"]
