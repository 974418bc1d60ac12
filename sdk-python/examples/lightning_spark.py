"""A LightningModule trained on a DataFrame of Spark: handwritten digits, two processes.

python lightning_spark.py                                   Spark on this machine
python lightning_spark.py --store s3a://bucket/digits --num-proc 4  on a cluster, with a store that all hosts reach
"""

from __future__ import annotations

from typing import Any

import digits_frames
import lightning
import torch

from ronde.spark.lightning import LightningEstimator


class LitDigits(lightning.LightningModule):
    """Two linear layers. A batch is a dictionary of tensors by column."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))

    def forward(self, pixels: torch.Tensor) -> Any:
        """Returns scores of the ten digits."""
        return self.layers(pixels)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        """Returns the loss of a batch."""
        del index
        loss = torch.nn.functional.cross_entropy(self(batch["pixels"]), batch["digit"])
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch["digit"]))
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        """Logs the share of digits that are recognized."""
        del index
        right = (self(batch["pixels"]).argmax(1) == batch["digit"]).double().mean()
        self.log("val_accuracy", right, batch_size=len(batch["digit"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer, whose learning rate is multiplied by the number of processes."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    """Trains, predicts, and prints the share of digits that were recognized."""
    options = digits_frames.arguments(__doc__)
    spark, train, test, store = digits_frames.prepared(options)
    torch.manual_seed(0)
    estimator = LightningEstimator(
        num_proc=options.num_proc,
        store=store,
        model=LitDigits(),
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
