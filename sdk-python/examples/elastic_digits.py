"""Elastic training on handwritten digits: workers may die and come while it runs.

    ronde run -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python elastic_digits.py
    ronde run -np 2 python elastic_digits.py        a job with a fixed number of ranks
    python elastic_digits.py                        one process

A global batch has the same number of images however many workers share it, and each image is used once in an epoch. A
worker prints a line when it begins and after each change, and at the end, as the other examples do, its accuracy and a
digest of its weights.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import time

import torch
from digits import GLOBAL_BATCH, Digits, dataset, report
from torch.nn.functional import cross_entropy

import ronde.torch as hvd


def main() -> None:
    """Trains and reports."""
    options = arguments()
    torch.set_num_threads(1)
    hvd.init()
    (images, labels), test = dataset(seed=0)
    # Different on each worker, so that the synchronization matters.
    torch.manual_seed(hvd.rank())
    model = Digits()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # It knows which images of the epoch are used, so that a change continues with the others.
    sampler = hvd.elastic.ElasticSampler(range(len(labels)))
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, step=0)
    state.register_reset_callbacks([lambda: announce("continues")])

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while state.epoch < options.epochs or not may_end(options.until):
            batch_size = max(1, GLOBAL_BATCH // hvd.size())
            indices = sampler.indices
            for start in range(0, len(indices), batch_size):
                batch = torch.tensor(indices[start : start + batch_size])
                optimizer.zero_grad()
                cross_entropy(model(images[batch]), labels[batch]).backward()
                optimizer.step()
                sampler.record_batch(state.step, len(batch))
                state.step += 1
                time.sleep(options.pause)
                if options.timeline:
                    append(options.timeline, time.monotonic(), hvd.rank(), hvd.size(), state.step)
                if state.step % options.commit_every == 0:
                    state.commit()
                else:
                    state.check_host_updates()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()
            if hvd.rank() == 0:
                of = "" if options.until else f" of {options.epochs}"
                print(f"epoch {state.epoch}{of} at step {state.step}", flush=True)

    announce("begins")
    train(state)
    report(model.state_dict(), test, hvd.rank(), hvd.size())
    hvd.shutdown()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--until", type=pathlib.Path, metavar="FILE", help="adds epochs until this file exists")
    parser.add_argument("--commit-every", type=int, default=5, metavar="STEPS", help="what a failure may cost")
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="makes each step longer")
    parser.add_argument("--timeline", type=pathlib.Path, metavar="FILE", help="where each step is noted")
    return parser.parse_args()


def may_end(until: pathlib.Path | None) -> bool:
    """Whether a file exists. Ranks end together, so it is enough that one of them has seen it."""
    if until is None:
        return True
    is_seen = torch.tensor([float(until.exists())])
    return hvd.allreduce(is_seen, name="end", op=hvd.Max).item() > 0


def append(path: pathlib.Path, *words: object) -> None:
    """Appends a line to a file that all workers share."""
    with path.open("a") as file:
        file.write(" ".join(map(str, words)) + "\n")


def announce(what: str) -> None:
    """Prints that this worker begins or continues, with its rank."""
    worker = os.environ.get("RONDE_WORKER", hvd.rank())
    print(f"worker {worker} (pid {os.getpid()}) {what} as rank {hvd.rank()} of {hvd.size()}", flush=True)


if __name__ == "__main__":
    main()
