"""Data-parallel training on handwritten digits with Ray: a function on workers that Ray starts.

python ray_digits.py                                    two workers on the nodes of the cluster, or of this machine
python ray_digits.py --workers 4 --secret ~/job-secret  on several nodes, which have this file (docs/RAY.md)
python ray_digits.py --train                            the same by Ray Train's TorchTrainer
python ray_digits.py --single                           one process, on the same global batches
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from digits import GLOBAL_BATCH, Digits, dataset, report, whole_batches
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 4


def train(weights_file: str | None = None, model_of: Any = None) -> None:
    """Trains on this rank's share of each global batch; the function that each worker calls.

    weights_file -- where rank 0 saves the weights
    model_of     -- wraps the model and finds rank and size; default: those of Horovod
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = Digits()
    model, optimizer, rank, size = (model_of or by_horovod)(digits)
    training, test = dataset(seed=0)
    data = whole_batches(*training)
    sampler: DistributedSampler[int] = DistributedSampler(data, size, rank, shuffle=False)
    for _ in range(EPOCHS):
        for images, labels in DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    if weights_file is not None:
        os.environ["DIGITS_WEIGHTS"] = weights_file
    report(digits.state_dict(), test, rank, size)


def by_horovod(digits: Digits) -> tuple[Any, Any, int, int]:
    """Returns model, optimizer, rank and size of a worker of RayExecutor."""
    import ronde.torch as hvd

    hvd.init()
    hvd.broadcast_parameters(digits.state_dict(), root_rank=0)
    return digits, hvd.DistributedOptimizer(sgd(digits), digits.named_parameters()), hvd.rank(), hvd.size()


def by_ray_train(digits: Digits) -> tuple[Any, Any, int, int]:
    """Returns model, optimizer, rank and size of a worker of Ray Train: DistributedDataParallel over ronde."""
    import ray.train.torch

    model = ray.train.torch.prepare_model(digits)
    context = ray.train.get_context()
    return model, sgd(digits), context.get_world_rank(), context.get_world_size()


def alone(digits: Digits) -> tuple[Any, Any, int, int]:
    """Returns model, optimizer, rank and size of a process without others."""
    return digits, sgd(digits), 0, 1


def sgd(digits: Digits) -> torch.optim.SGD:
    """The optimizer."""
    return torch.optim.SGD(digits.parameters(), lr=0.05, momentum=0.9)


def by_executor(workers: int, secret: str | None, weights_file: str | None) -> None:
    """Trains on workers of RayExecutor."""
    from ronde.ray import RayExecutor

    executor = RayExecutor(RayExecutor.create_settings(job_secret_file=secret), num_workers=workers)
    executor.start()
    executor.run(train, args=[weights_file])
    executor.shutdown()


def by_trainer(workers: int, secret: str | None, weights_file: str | None) -> None:
    """Trains on workers of Ray Train."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    from ronde.ray.train import RondeConfig

    trainer = TorchTrainer(
        lambda: train(weights_file, by_ray_train),
        torch_config=RondeConfig(job_secret_file=secret),
        scaling_config=ScalingConfig(num_workers=workers),
    )
    trainer.fit()


def main() -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--secret", help="for several nodes: a file with the same secret on each of them")
    parser.add_argument("--train", action="store_true", help="use Ray Train instead of RayExecutor")
    parser.add_argument("--single", action="store_true", help="train in this process")
    options = parser.parse_args()
    weights_file = os.environ.get("DIGITS_WEIGHTS")
    if options.single:
        train(weights_file, alone)
        return
    import ray

    ray.init()
    (by_trainer if options.train else by_executor)(options.workers, options.secret, weights_file)


if __name__ == "__main__":
    main()
