"""Lightning on handwritten digits: one import, and the name of a strategy.

ronde run -np 2 python lightning_digits.py
ronde run -np 2 python lightning_digits.py --strategy horovod
python lightning_digits.py                                        one process, on the same global batches
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning
import torch
from digits import GLOBAL_BATCH, Digits, dataset, report, whole_batches
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import ronde.lightning  # registers the strategies

EPOCHS = 4


class LitDigits(lightning.LightningModule):
    """The model as Lightning wants it."""

    def __init__(self, learning_rate: float) -> None:
        super().__init__()
        self.digits = Digits()
        self.learning_rate = learning_rate

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Returns the loss of a batch, whose mean over all ranks is logged."""
        del index
        images, labels = batch
        loss = cross_entropy(self.digits(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate, momentum=0.9)


def main() -> None:
    """Trains and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="ronde", help="ronde, or horovod, which multiplies the learning rate")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lightning.seed_everything(0, verbose=False)
    size = ronde.lightning.RondeEnvironment().world_size()
    train, test = dataset(seed=0)
    loader = DataLoader(whole_batches(*train), batch_size=GLOBAL_BATCH // size)
    model = LitDigits(0.05 / size if options.strategy == "horovod" else 0.05)
    trainer = lightning.Trainer(
        strategy=options.strategy,
        accelerator="cpu",
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    report(model.digits.state_dict(), test, trainer.global_rank, trainer.world_size)
    if trainer.is_global_zero:
        print(f"mean loss of the last epoch {float(trainer.callback_metrics['loss']):.4f}", flush=True)


if __name__ == "__main__":
    main()
