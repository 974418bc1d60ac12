"""Data-parallel training on handwritten digits with Spark: a function on ranks that Spark's tasks start.

python spark_digits.py                                     two ranks, on this machine
spark-submit --master spark://alpha:7077 spark_digits.py   on a cluster, as many ranks as it has processors
spark-submit ... spark_digits.py --secret ~/job-secret     on several hosts, which have this file (docs/SPARK.md)
python spark_digits.py --single                            one process, on the same global batches
"""

from __future__ import annotations

import argparse
import os

import torch
from digits import GLOBAL_BATCH, Digits, dataset, report, whole_batches
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

EPOCHS = 4


def train(weights_file: str | None, is_alone: bool = False) -> None:
    """Trains on this rank's share of each global batch; the function that each rank calls.

    weights_file -- where rank 0 saves the weights
    is_alone     -- whether this process has no others
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = Digits()
    optimizer = torch.optim.SGD(digits.parameters(), lr=0.05, momentum=0.9)
    rank, size = 0, 1
    if not is_alone:
        import ronde.torch as hvd

        hvd.init()
        rank, size = hvd.rank(), hvd.size()
        hvd.broadcast_parameters(digits.state_dict(), root_rank=0)
        optimizer = hvd.DistributedOptimizer(optimizer, digits.named_parameters())
    training, test = dataset(seed=0)
    data = whole_batches(*training)
    sampler: DistributedSampler[int] = DistributedSampler(data, size, rank, shuffle=False)
    for _ in range(EPOCHS):
        for images, labels in DataLoader(data, batch_size=GLOBAL_BATCH // size, sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(digits(images), labels).backward()
            optimizer.step()
    if weights_file is not None:
        os.environ["DIGITS_WEIGHTS"] = weights_file
    report(digits.state_dict(), test, rank, size)


def main() -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="default: spark.default.parallelism")
    parser.add_argument("--secret", help="for several hosts: a file with the same secret on each of them")
    parser.add_argument("--single", action="store_true", help="train in this process")
    options = parser.parse_args()
    weights_file = os.environ.get("DIGITS_WEIGHTS")
    if options.single:
        train(weights_file, is_alone=True)
        return
    from pyspark.sql import SparkSession

    import ronde.spark

    builder = SparkSession.builder.appName("digits")
    # `spark-submit` names the cluster; without it, two processors of this machine are one.
    spark = (builder if "SPARK_ENV_LOADED" in os.environ else builder.master("local[2]")).getOrCreate()
    ronde.spark.run(train, (weights_file,), num_proc=options.ranks, job_secret_file=options.secret)
    spark.stop()


if __name__ == "__main__":
    main()
