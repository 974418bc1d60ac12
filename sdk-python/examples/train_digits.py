"""Data-parallel training on scikit-learn's handwritten digits.

    ronde run -np 4 python train_digits.py          four workers with disjoint shards
    python train_digits.py --single                 a single process, on the same global batches
    ronde run -np 4 --sidecars 2 python train_digits.py --codec topk ratio=0.05     gradients encoded by a plugin

Rank 0 prints loss and test accuracy after each epoch and at the end one line of JSON: the epochs, and for each rank a
digest of its weights (they must be equal) and the share of time that it waited for gradients. `--report FILE` writes
the same into a file. Any launcher starts it, mpirun for example; a process that none has started is a job of one rank.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import time
from typing import Any

import torch
from digits import GLOBAL_BATCH, Digits, accuracy, dataset
from torch import nn
from torch.nn import functional as F

import ronde.torch as hvd

LEARNING_RATE = 3e-3
# The factor of the learning rate in the last epoch.
LEARNING_RATE_END = 0.05


def main() -> None:
    """Trains and reports."""
    options = arguments()
    torch.set_num_threads(1)
    if not options.single:
        hvd.init()
    rank, size = (0, 1) if options.single else (hvd.rank(), hvd.size())
    if GLOBAL_BATCH % size:
        raise SystemExit(f"the global batch of {GLOBAL_BATCH} images cannot be split among {size} ranks evenly")
    train, test = dataset(options.seed)
    # Different on each rank, so that the broadcast matters.
    torch.manual_seed(options.seed + rank)
    model = Digits()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    if not options.single:
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compression(options.codec)
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, LEARNING_RATE_END, total_iters=options.epochs)
    trainer = Trainer(model, optimizer, rank, size, options.seed)
    epochs = []
    for epoch in range(options.epochs):
        loss = trainer.epoch(epoch, *train)
        schedule.step()
        epochs.append({"loss": loss, "accuracy": accuracy(model, *test)})
        if rank == 0:
            print(f"epoch {epoch + 1:2}  loss {loss:.4f}  test accuracy {epochs[-1]['accuracy']:.4f}", flush=True)
    ranks = [{"rank": r, "digest": digest, "waiting": waiting} for r, (digest, waiting) in enumerate(trainer.summary())]
    report = {"ranks": ranks, "epochs": epochs, "accuracy": epochs[-1]["accuracy"], "seconds": trainer.seconds}
    report["digests_equal"] = len({entry["digest"] for entry in ranks}) == 1
    if rank == 0:
        print(json.dumps(report), flush=True)
        if options.report is not None:
            options.report.write_text(json.dumps(report))
    if not options.single:
        hvd.barrier()
        hvd.shutdown()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--single", action="store_true", help="train without a session of ronde")
    parser.add_argument(
        "--codec", nargs="+", metavar=("PLUGIN", "PARAMETER=VALUE"), help="the plugin that encodes gradients"
    )
    parser.add_argument("--report", type=pathlib.Path, help="where rank 0 writes the final JSON")
    return parser.parse_args()


def compression(codec: list[str] | None) -> Any:
    """Parses a plugin and its parameters from the command line."""
    if codec is None:
        return hvd.Compression.none
    name, *given = codec
    pairs = [part.partition("=") for part in given]
    return hvd.Compression.plugin(name, **{key: parameter(text) for key, _, text in pairs})


def parameter(text: str) -> Any:
    """Returns a JSON number or bool, else the text itself."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


class Trainer:
    """Trains on this rank's part of each global batch, and measures how long it waits for others."""

    def __init__(self, model: nn.Module, optimizer: Any, rank: int, size: int, seed: int) -> None:
        self.model, self.optimizer = model, optimizer
        self.rank, self.size, self.seed = rank, size, seed
        self.seconds = 0.0
        self.waited_s = 0.0

    def epoch(self, number: int, images: torch.Tensor, labels: torch.Tensor) -> float:
        """One pass over the images; returns the mean loss over all ranks."""
        start = time.perf_counter()
        # All ranks shuffle alike and take every size-th image: shards are disjoint, and a global batch is the same
        # images however many ranks share it.
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(self.seed * 1000 + number))
        losses = []
        for batch in range(len(labels) // GLOBAL_BATCH):
            chosen = order[batch * GLOBAL_BATCH : (batch + 1) * GLOBAL_BATCH][self.rank :: self.size]
            losses.append(self.step(images[chosen], labels[chosen]))
        loss = torch.stack(losses).mean()
        if self.size > 1:
            loss = hvd.allreduce(loss, name="loss")
        self.seconds += time.perf_counter() - start
        return float(loss)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """One step on this rank's part of a batch; returns its loss."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        if self.size == 1:
            self.optimizer.step()
            return loss.detach()
        start = time.perf_counter()
        self.optimizer.synchronize()
        self.waited_s += time.perf_counter() - start
        with self.optimizer.skip_synchronize():
            self.optimizer.step()
        return loss.detach()

    def summary(self) -> list[tuple[str, float]]:
        """Returns for each rank the digest of its weights and the share of time that it waited."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.numpy().tobytes())
        waiting = self.waited_s / max(self.seconds, 1e-9)
        if self.size == 1:
            return [(digest.hexdigest(), waiting)]
        digests = hvd.allgather(torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8), name="digest")
        shares = hvd.allgather(torch.tensor([waiting], dtype=torch.float64), name="waiting")
        rows = digests.reshape(self.size, -1)
        return [(bytes(row.tolist()).hex(), float(share)) for row, share in zip(rows, shares)]


if __name__ == "__main__":
    main()
