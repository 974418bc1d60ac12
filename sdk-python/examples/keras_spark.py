"""A model of Keras trained on a DataFrame of Spark: handwritten digits, two processes.

python keras_spark.py                                       Spark on this machine
python keras_spark.py --store s3a://bucket/digits --num-proc 4      on a cluster, with a store that all hosts reach
"""

from __future__ import annotations

import digits_frames
import keras

from ronde.spark.keras import KerasEstimator


def main() -> None:
    """Trains, predicts, and prints the share of digits that were recognized."""
    options = digits_frames.arguments(__doc__)
    spark, train, test, store = digits_frames.prepared(options)
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input((64,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)]
    estimator = KerasEstimator(
        num_proc=options.num_proc,
        store=store,
        model=keras.Sequential(layers),
        # Multiplied by the number of processes.
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        feature_cols=["pixels"],
        label_cols=["digit"],
        validation=0.1,
        batch_size=32,
        epochs=options.epochs,
        partitions_per_process=2,
        random_seed=0,
        verbose=2,
    )
    trained = estimator.fit(train).setOutputCols(["scores"])
    digits_frames.report(trained.transform(test))
    spark.stop()


if __name__ == "__main__":
    main()
