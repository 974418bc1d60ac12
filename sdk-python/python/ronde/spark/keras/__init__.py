"""Estimators of Spark ML for Keras 3: `horovod.spark.keras` on ronde.

import ronde.spark.keras as hvd

estimator = hvd.KerasEstimator(num_proc=4, store=store, model=model, optimizer=optimizer, loss=loss, ...)
predictions = estimator.fit(train_df).setOutputCols(["predict"]).transform(test_df)
"""

from ronde.keras import Compression, callbacks
from ronde.spark.keras.estimator import KerasEstimator, KerasModel

__all__ = ["Compression", "KerasEstimator", "KerasModel", "callbacks"]
