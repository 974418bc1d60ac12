"""DeepSpeed's ZeRO on handwritten digits: one line names the backend.

    ronde run -np 2 python deepspeed_digits.py --stage 2
    ronde run -np 1 python deepspeed_digits.py --stage 2     one process, on the same global batches

On machines without GPUs set DS_ACCELERATOR=cpu. DeepSpeed compiles C++ in its first run, for minutes.
"""

from __future__ import annotations

import argparse

import deepspeed
import torch
import torch.distributed as dist
from digits import GLOBAL_BATCH, Digits, dataset, report, whole_batches
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 4


def main() -> None:
    """Trains and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=1, help="of ZeRO: 1 shards optimizer states, 2 gradients too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    train, test = dataset(seed=0)
    data = whole_batches(*train)
    deepspeed.init_distributed("ronde")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    digits = Digits()
    settings = {
        "train_batch_size": GLOBAL_BATCH,
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // size,
        "zero_optimization": {"stage": options.stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(digits.parameters(), lr=0.05, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=digits, optimizer=optimizer, config=settings)
    sampler: DistributedSampler[int] = DistributedSampler(data, shuffle=False)
    for _ in range(EPOCHS):
        for images, labels in DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler):
            engine.backward(cross_entropy(engine(images), labels))
            engine.step()
    report(digits.state_dict(), test, rank, size)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
