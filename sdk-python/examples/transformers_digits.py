"""Transformers' Trainer on handwritten digits, with a tiny model that is made here. ronde is not named here.

RONDE_AUTOINIT=1 ronde run -np 2 python transformers_digits.py
python transformers_digits.py                                       one process, on the same global batches
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from digits import GLOBAL_BATCH, Digits, dataset, report, whole_batches
from torch.nn.functional import cross_entropy
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

EPOCHS = 4


class Config(PretrainedConfig):
    """What Transformers asks of every model."""

    model_type = "digits"


class Classifier(PreTrainedModel):
    """The model as Transformers wants it."""

    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.digits = Digits()
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Leaves the weights as PyTorch draws them."""

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns loss and scores."""
        scores = self.digits(images)
        return {"loss": cross_entropy(scores, labels), "logits": scores}


def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
    """Returns a batch of rows of the data."""
    images, labels = zip(*rows)
    return {"images": torch.stack(images), "labels": torch.stack(labels)}


def main() -> None:
    """Trains and reports."""
    torch.set_num_threads(1)
    train, test = dataset(seed=0)
    size = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    model = Classifier(Config())
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=GLOBAL_BATCH // size,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            remove_unused_columns=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=whole_batches(*train),
            data_collator=collate,
            optimizers=(optimizer, None),
        )
        trainer.train()
        report(model.digits.state_dict(), test, arguments.process_index, arguments.world_size)


if __name__ == "__main__":
    main()
