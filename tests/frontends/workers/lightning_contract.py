"""What the strategies of ronde.lightning promise, in one job."""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import lightning
import ronde.lightning
import ronde.torch as hvd
import torch
import torch.distributed as dist

sys.path.append(str(pathlib.Path(__file__).parents[3] / "sdk-python" / "examples"))
from digits import Digits, dataset, report

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
train, test = dataset(0)


class Model(lightning.LightningModule):
    """Records what the strategy does on the way."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.digits, self.rate = Digits(), rate
        self.norms: list[float] = []
        self.prepared: list[str] = []

    def prepare_data(self) -> None:
        # With the process group's barrier around it.
        self.prepared.append(dist.get_backend() if dist.is_initialized() else "none")

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        del index
        return torch.nn.functional.cross_entropy(self.digits(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        del optimizer
        self.norms.append(float(torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def trained(strategy: Any, rate: float) -> tuple[Model, lightning.Trainer]:
    """Trains with accumulation (3 batches a step, 8 batches: the last step has 2), clipping and a scheduler."""
    torch.manual_seed(hvd.rank() if hvd.is_initialized() else 0)  # rank 0's parameters win
    model = Model(rate)
    data = torch.utils.data.TensorDataset(train[0][:512], train[1][:512])
    loader = torch.utils.data.DataLoader(data, batch_size=32)
    trainer = lightning.Trainer(
        strategy=strategy, max_epochs=2, accumulate_grad_batches=3, gradient_clip_val=0.05, **QUIET
    )
    trainer.fit(model, loader)
    return model, trainer


def check_collectives(strategy: Any) -> None:
    rank, size = strategy.global_rank, strategy.world_size
    assert (rank, size) == (hvd.rank(), 2)
    mine = torch.tensor([float(rank)])
    assert strategy.reduce(mine.clone()).item() == 0.5
    assert strategy.reduce(mine.clone(), reduce_op="sum").item() == 1.0
    assert strategy.reduce("text") == "text"
    assert strategy.all_gather(mine).tolist() == [[0.0], [1.0]]
    assert strategy.broadcast({"rank": rank}, src=1) == {"rank": 1}
    assert strategy.reduce_boolean_decision(True) is True
    assert strategy.reduce_boolean_decision(rank == 0) is False
    assert strategy.reduce_boolean_decision(rank == 0, all=False) is True
    strategy.barrier()


def raises(kind: type[Exception], words: str, call: Any) -> None:
    try:
        call()
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}: {words}")


raises(ValueError, "devices=3", lambda: lightning.Trainer(strategy="ronde", devices=3, **QUIET))
raises(ValueError, "devices=3", lambda: lightning.Trainer(strategy="horovod", devices=3, **QUIET))
raises(TypeError, "start_method", lambda: ronde.lightning.RondeStrategy(start_method="spawn"))

ddp, trainer = trained("ronde", 0.1)
assert isinstance(trainer.strategy, ronde.lightning.RondeStrategy)
assert (trainer.global_step, trainer.world_size, trainer.num_devices) == (6, 2, 1), trainer.global_step
assert dist.get_backend() == "ronde"
assert ddp.prepared == (["ronde"] if hvd.rank() == 0 else []), ddp.prepared
check_collectives(trainer.strategy)

horovod, trainer = trained("horovod", 0.05)  # multiplied by two ranks
assert isinstance(trainer.strategy, ronde.lightning.HorovodStrategy)
assert trainer.global_step == 6
assert trainer.optimizers[0].param_groups[0]["lr"] == 0.025  # the scheduler halved 0.1 twice
check_collectives(trainer.strategy)
raises(ValueError, "reduces over all ranks", lambda: trainer.strategy.all_gather(torch.ones(1), group=object()))
raises(ValueError, "'mean' and 'sum'", lambda: trainer.strategy.reduce(torch.ones(1), reduce_op="max"))
unscaled, _ = trained(ronde.lightning.HorovodStrategy(scale_learning_rate=False), 0.1)

gathered = hvd.allgather(torch.tensor([ddp.norms, horovod.norms]).unsqueeze(0))
assert torch.equal(gathered[0], gathered[1]), gathered  # hooks see averages, the same on all ranks
for other in (horovod, unscaled):
    for (name, one), another in zip(ddp.digits.state_dict().items(), other.digits.state_dict().values()):
        assert torch.allclose(one, another, rtol=1e-3, atol=1e-5), (name, (one - another).abs().max())
report(horovod.digits.state_dict(), test, hvd.rank(), hvd.size())
