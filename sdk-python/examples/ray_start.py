"""Compares how long RayExecutor and Ray Train's torch backend take to start two workers: `python ray_start.py`.

Each start counts up to the result of a first all-reduce on rank 0. The two alternate in one run, so that both see the
same load, and the medians are printed. RAY_ADDRESS names the cluster; without it one on this host is started. If all
of it takes longer than `--timeout` seconds, the program prints where it waits, and ends.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import pathlib
import statistics
import tempfile
import time

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from ronde.ray import RayExecutor


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=900)
    arguments = parser.parse_args()
    rounds: int = arguments.rounds
    faulthandler.dump_traceback_later(arguments.timeout, exit=True)
    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    kinds = {"RayExecutor": of_executor, "Ray Train": of_train}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as folder:
        # The first start of each kind loads files into the page cache, and is not counted.
        for number in range(rounds + 1):
            for kind, start in kinds.items():
                ended = pathlib.Path(folder, f"{kind} {number}")
                begun = time.time()
                start(ended)
                if number:
                    seconds[kind].append(float(ended.read_text()) - begun)
    medians = {kind: statistics.median(each) for kind, each in seconds.items()}
    for kind, each in seconds.items():
        print(f"{kind}: median {medians[kind]:.2f} s of {', '.join(f'{one:.2f}' for one in each)}")
    print(f"RayExecutor / Ray Train: {medians['RayExecutor'] / medians['Ray Train']:.2f}")


def of_executor(path: pathlib.Path) -> None:
    """Starts RayExecutor's workers, up to a first all-reduce. Ends them, as the other one does."""
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2)
    executor.start()
    executor.run(reduced, args=[path])
    executor.shutdown()


def reduced(path: pathlib.Path) -> None:
    """Runs in the workers of RayExecutor."""
    import torch

    import ronde.torch as hvd

    hvd.init()
    assert float(hvd.allreduce(torch.ones(1), op=hvd.Sum)) == 2.0
    if hvd.rank() == 0:
        path.write_text(str(time.time()))


def of_train(path: pathlib.Path) -> None:
    """The same by Ray Train with Gloo."""
    scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
    given, torch_config = {"path": str(path)}, TorchConfig(backend="gloo")
    TorchTrainer(train, train_loop_config=given, torch_config=torch_config, scaling_config=scaling).fit()


def train(config: dict[str, str]) -> None:
    """Runs in the workers of Ray Train."""
    import torch
    import torch.distributed

    ones = torch.ones(1)
    torch.distributed.all_reduce(ones)
    assert float(ones) == 2.0
    if torch.distributed.get_rank() == 0:
        pathlib.Path(config["path"]).write_text(str(time.time()))


if __name__ == "__main__":
    main()
