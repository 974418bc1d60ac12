"""Elastic training with JAX on handwritten digits: workers may die and come while it runs.

ronde run -np 2 --min-np 1 --max-np 4 --host-discovery-script ./hosts.sh python jax_elastic_digits.py
ronde run -np 2 python jax_elastic_digits.py        a job with a fixed number of ranks

A worker prints a line when it begins and after each change, and at the end its accuracy and a digest of its weights.
"""

from __future__ import annotations

import argparse
import os
import time

import jax
import jax.numpy as jnp
import numpy
from jax_digits import BATCH, report, split, start, step

import ronde.jax as hvd


def main() -> None:
    """Trains and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.0, metavar="SECONDS", help="makes each step longer")
    parser.add_argument("--pause-below", type=int, metavar="RANKS", help="pauses only while there are fewer ranks")
    options = parser.parse_args()
    hvd.init()
    images, labels, test, train = split()
    parameters = start(jax.random.key(hvd.rank()))
    state = hvd.elastic.JaxState(
        parameters=parameters, velocity=jax.tree.map(jnp.zeros_like, parameters), epoch=0, batch=0
    )
    state.register_reset_callbacks([lambda: announce("continues")])

    @hvd.elastic.run
    def run(state: hvd.elastic.JaxState) -> None:
        while state.epoch < options.epochs:
            shuffled = numpy.random.default_rng(state.epoch).permutation(train)
            for batch in range(state.batch, len(shuffled) // BATCH):
                # Shares of equal length; what is left of a batch is not used.
                share = shuffled[batch * BATCH :][: BATCH // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
                state.parameters, state.velocity, _ = step(
                    state.parameters, state.velocity, images[share], labels[share]
                )
                state.batch = batch + 1
                if state.batch % 5 == 0:
                    state.commit()
                if options.pause_below is None or hvd.size() < options.pause_below:
                    time.sleep(options.pause)
            state.epoch, state.batch = state.epoch + 1, 0
            state.commit()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch} is complete", flush=True)

    announce("begins")
    run(state)
    report(state.parameters, images[test], labels[test])
    hvd.shutdown()


def announce(what: str) -> None:
    """Prints that this worker begins or continues, with its rank."""
    worker = os.environ.get("RONDE_WORKER", hvd.rank())
    print(f"worker {worker} (pid {os.getpid()}) {what} as rank {hvd.rank()} of {hvd.size()}", flush=True)


if __name__ == "__main__":
    main()
