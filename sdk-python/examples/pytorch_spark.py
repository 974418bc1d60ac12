"""A model of PyTorch trained on a DataFrame of Spark: handwritten digits, two processes.

python pytorch_spark.py                                     Spark on this machine
python pytorch_spark.py --store s3a://bucket/digits --num-proc 4    on a cluster, with a store that all hosts reach
"""

from __future__ import annotations

import digits_frames
import torch

from ronde.spark.torch import TorchEstimator


def main() -> None:
    """Trains, predicts, and prints the share of digits that were recognized."""
    options = digits_frames.arguments(__doc__)
    spark, train, test, store = digits_frames.prepared(options)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    estimator = TorchEstimator(
        num_proc=options.num_proc,
        store=store,
        model=model,
        # Multiplied by the number of processes.
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss=torch.nn.CrossEntropyLoss(),
        feature_cols=["pixels"],
        label_cols=["digit"],
        validation=0.1,
        batch_size=32,
        epochs=options.epochs,
        partitions_per_process=2,
        random_seed=0,
    )
    trained = estimator.fit(train).setOutputCols(["scores"])
    digits_frames.report(trained.transform(test))
    spark.stop()


if __name__ == "__main__":
    main()
