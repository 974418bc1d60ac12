"""Estimators of Spark ML for PyTorch: `horovod.spark.torch` on ronde.

import ronde.spark.torch as hvd

estimator = hvd.TorchEstimator(num_proc=4, store=store, model=model, optimizer=optimizer, loss=loss, ...)
predictions = estimator.fit(train_df).transform(test_df)
"""

from ronde.frameworks import needs_torch  # noqa: F401 -- first, for its error
from ronde.spark.torch.estimator import TorchEstimator, TorchModel
from ronde.torch import Compression

__all__ = ["Compression", "TorchEstimator", "TorchModel"]
