"""Lightning's own strategy "ddp" over a group that RONDE_AUTOINIT=1 has made; ronde.lightning is not imported."""

from __future__ import annotations

import pathlib
import sys
import time

import lightning
import torch
import torch.distributed as dist

sys.path.append(str(pathlib.Path(__file__).parents[3] / "sdk-python" / "examples"))
from digits import Digits, dataset, report


class Empty(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.digits = Digits()

    def prepare_data(self) -> None:
        time.sleep(0.5)  # the other ranks wait in Gloo's group

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        del index
        return self.digits(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


lightning.seed_everything(0, verbose=False)
train, test = dataset(0)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(train[0][:64]), batch_size=32)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = lightning.Trainer(strategy="ddp", accelerator="cpu", devices=2, max_epochs=1, **quiet)
model = Empty()
trainer.fit(model, loader)
assert dist.get_backend() == "ronde", dist.get_backend()
report(model.digits.state_dict(), test, trainer.global_rank, trainer.world_size)
