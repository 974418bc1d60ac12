"""SGD, LARS and LAMB with warm-up on scikit-learn's digits: `ronde run -np 4 python large_batch.py --optimizer lamb`.

The learning rate is that of one rank times a factor for the number of ranks: linear for SGD and LARS, the square root
for LAMB. It rises to that over the first epochs and falls along a cosine. Rank 0 prints the accuracy at the end.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from digits import Digits, accuracy, dataset
from torch.nn import functional as F

import ronde.torch as hvd

BATCH = 32
# Of one rank.
RATES = {"sgd": 0.05, "lars": 0.05, "lamb": 0.005}


class LayerWise(torch.optim.Optimizer):
    """SGD with momentum (LARS) or Adam (LAMB), whose step for each tensor is in proportion to the norm of its weights.

    kind         -- "lars" or "lamb"
    trust        -- the ratio of the norms of step and weights is at most the learning rate times this
    weight_decay -- is added to the gradient, or to Adam's direction
    """

    def __init__(self, params: Any, lr: float, kind: str, trust: float = 1.0, weight_decay: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr, "kind": kind, "trust": trust, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Makes a step from the gradients."""
        del closure
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._step(weight, group)

    def _step(self, weight: torch.Tensor, group: dict[str, Any]) -> None:
        direction = self._direction(weight, group)
        weights, length = weight.norm(), direction.norm()
        # Biases that are zero have no norm to compare with.
        ratio = float(group["trust"] * weights / length) if weights > 0 and length > 0 else 1.0
        state = self.state[weight]
        if group["kind"] == "lars":
            momentum = state.setdefault("momentum", torch.zeros_like(weight))
            momentum.mul_(0.9).add_(direction, alpha=group["lr"] * ratio * 0.02)
            weight.sub_(momentum)
        else:
            weight.sub_(direction, alpha=group["lr"] * min(ratio, 10.0))

    def _direction(self, weight: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        gradient: Any = weight.grad
        if group["kind"] == "lars":
            return gradient.add(weight, alpha=group["weight_decay"])
        state = self.state[weight]
        if not state:
            state.update(step=0, mean=torch.zeros_like(weight), square=torch.zeros_like(weight))
        state["step"] += 1
        state["mean"].mul_(0.9).add_(gradient, alpha=0.1)
        state["square"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        mean = state["mean"] / (1 - 0.9 ** state["step"])
        square = state["square"] / (1 - 0.999 ** state["step"])
        return mean / (square.sqrt() + 1e-6) + group["weight_decay"] * weight


def main() -> None:
    """Trains and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", choices=sorted(RATES), default="sgd")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--warmup-epochs", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    train, test = dataset(7)
    torch.manual_seed(hvd.rank())
    model = Digits()
    factor = math.sqrt(hvd.size()) if options.optimizer == "lamb" else hvd.size()
    rate, optimizer = RATES[options.optimizer] * factor, None
    if options.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    else:
        optimizer = LayerWise(model.parameters(), lr=rate, kind=options.optimizer)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    data = torch.utils.data.TensorDataset(*train)
    sampler: Any = torch.utils.data.DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank(), seed=7)
    loader: Any = torch.utils.data.DataLoader(data, BATCH, sampler=sampler, drop_last=True)
    schedule = warmed_up(optimizer, options.warmup_epochs * len(loader), options.epochs * len(loader))
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
    if hvd.rank() == 0:
        found = accuracy(model, *test)
        print(f"{options.optimizer}: batch {BATCH * hvd.size()}, rate {rate:g}, accuracy {found:.3f}")


def warmed_up(optimizer: Any, warmup: int, steps: int) -> Any:
    """Returns a schedule that begins at 1/ranks of the rate, reaches it after `warmup` steps, and ends at zero."""
    start = 1.0 / hvd.size()

    def factor(step: int) -> float:
        if step < warmup:
            return start + (1.0 - start) * step / warmup
        return 0.5 * (1.0 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


if __name__ == "__main__":
    main()
