"""PyTorch's DistributedDataParallel on handwritten digits; a program for torchrun in which the backend's name is ronde.

ronde run -np 2 python ddp_digits.py
torchrun --nproc-per-node 2 ddp_digits.py   on one host
sbatch train.sbatch python ddp_digits.py    in the jobs of compose/slurm and compose/kubernetes, too
python ddp_digits.py                        one process, on the same global batches
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from digits import GLOBAL_BATCH, Digits, dataset, report, whole_batches
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 4


def main() -> None:
    """Trains and reports."""
    torch.set_num_threads(1)
    # Launchers set RANK; the scripts for Slurm, Kubernetes and compose set RONDE_RANK.
    is_alone = not {"RANK", "RONDE_RANK"} & set(os.environ)
    if not is_alone:
        dist.init_process_group("ronde")
    rank, size = (0, 1) if is_alone else (dist.get_rank(), dist.get_world_size())
    train, test = dataset(seed=0)
    data = whole_batches(*train)
    sampler: DistributedSampler[int] = DistributedSampler(data, size, rank, shuffle=False)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler)
    torch.manual_seed(0)
    digits = Digits()
    model = digits if is_alone else torch.nn.parallel.DistributedDataParallel(digits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(EPOCHS):
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    report(digits.state_dict(), test, rank, size)
    if not is_alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
