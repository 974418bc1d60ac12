"""Hyperparameters of a network for handwritten digits by Ray Tune; each trial trains on several workers.

python ray_tune_digits.py --trials 8 --slots 2
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile
from typing import Any

import ray
import torch
from digits import GLOBAL_BATCH, Digits, accuracy, dataset, whole_batches
from ray import tune
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

import ronde.torch as hvd
from ronde.ray.tune import DistributedTrainableCreator, report, restored


def train(config: dict[str, Any]) -> None:
    """Trains with the rate and the momentum of a trial; each rank of the trial calls it."""
    hvd.init()
    torch.set_num_threads(1)
    model = Digits()
    optimizer = torch.optim.SGD(model.parameters(), config["rate"], config["momentum"])
    begin = 0
    with restored() as folder:
        if folder is not None:
            saved = torch.load(folder / "state.pt", weights_only=True)
            model.load_state_dict(saved["model"])
            begin = saved["epoch"]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    distributed = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    training, test = dataset(seed=0)
    data = whole_batches(*training)
    sampler: DistributedSampler[int] = DistributedSampler(data, hvd.size(), hvd.rank())
    for epoch in range(begin, config["epochs"]):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_size=GLOBAL_BATCH // hvd.size(), sampler=sampler):
            distributed.zero_grad()
            cross_entropy(model(images), labels).backward()
            distributed.step()
        with tempfile.TemporaryDirectory() as name:
            torch.save({"model": model.state_dict(), "epoch": epoch + 1}, pathlib.Path(name, "state.pt"))
            metrics = {"accuracy": accuracy(model, *test), "epoch": epoch, "size": hvd.size()}
            report(metrics, tune.Checkpoint.from_directory(name))


def main() -> None:
    """Tunes and prints the best trial."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--slots", type=int, default=2, help="workers of each trial")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--storage", help="where Ray keeps results and checkpoints; default: ~/ray_results")
    options = parser.parse_args()
    ray.init()
    best = search(options.trials, options.slots, options.epochs, options.storage).get_best_result()
    assert best.config is not None
    print(f"best accuracy {best.metrics['accuracy']:.4f} with rate {best.config['rate']:.4f}", flush=True)


def search(trials: int, slots: int, epochs: int, storage: str | None) -> tune.ResultGrid:
    """Runs the trials. Optuna chooses their values."""
    from ray.tune.search.optuna import OptunaSearch

    tuner = tune.Tuner(
        DistributedTrainableCreator(train, num_slots=slots),
        param_space={"epochs": epochs, "rate": tune.loguniform(0.03, 0.2), "momentum": tune.choice([0.8, 0.9])},
        tune_config=tune.TuneConfig(metric="accuracy", mode="max", num_samples=trials, search_alg=OptunaSearch(seed=1)),
        run_config=tune.RunConfig(storage_path=storage),
    )
    return tuner.fit()


if __name__ == "__main__":
    main()
