"""Run by every rank: how long a state takes to reach new workers, by a broadcast of rank 0 and by a hand-over.

ronde run -np 4 --sidecars 2 python handover_times.py [--megabytes 100] [--rounds 9] [--new 1]

The last ranks are the new ones. Both ways take turns, so that noise affects both alike.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from typing import Any, Callable

import torch

import ronde.torch as hvd
from ronde.torch import functions
from ronde.torch.elastic import chunks, handover, state

LAYER_BYTES = 4 << 20


def main() -> None:
    """Measures. Prints medians and ranges in milliseconds, and those of the ratios to a broadcast in the same round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new", type=int, default=1)
    options = parser.parse_args()
    hvd.init()
    side = int((LAYER_BYTES / 4) ** 0.5)
    layers = max(1, (options.megabytes << 20) // LAYER_BYTES)
    torch.manual_seed(hvd.rank())
    model = torch.nn.Sequential(*[torch.nn.Linear(side, side) for _ in range(layers)])
    parts = functools.partial(state.ModelStateHandler(model).parts, "model")
    hvd.broadcast_parameters(model.state_dict(), 0)
    is_new = hvd.rank() >= hvd.size() - options.new
    cases: dict[str, Callable[[], Any]] = {
        "broadcast of rank 0": lambda: functions.broadcast_parameters(model.state_dict(), 0),
        "hand-over": lambda: handover.hand_over(parts(), has_state=not is_new),
        "hand-over by one source": lambda: one_source(parts(), is_new),
        "nobody is new": lambda: handover.hand_over(parts(), has_state=True),
        "digests": lambda: [chunk.digest() for chunk in chunks.chunks_of(parts())],
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, run in cases.items():
            hvd.barrier()
            begin = time.perf_counter()
            run()
            hvd.barrier()
            times[name].append(1000 * (time.perf_counter() - begin))
    if hvd.rank() == 0:
        first = times["broadcast of rank 0"]
        for name, each in times.items():
            print(f"{name}: {json.dumps(summary(each, first))}", flush=True)


def one_source(parts: list[chunks.Part], is_new: bool) -> None:
    """Hands the state over by the first rank that can."""
    kept, handover.SOURCES_MAX = handover.SOURCES_MAX, 1
    try:
        handover.hand_over(parts, has_state=not is_new)
    finally:
        handover.SOURCES_MAX = kept


def summary(times_ms: list[float], others_ms: list[float]) -> dict[str, float]:
    """Returns the median and the range, and the median of the ratios to other times."""
    ratio = statistics.median([mine / other for mine, other in zip(times_ms, others_ms)])
    found = {"median_ms": statistics.median(times_ms), "least_ms": min(times_ms), "most_ms": max(times_ms)}
    return {name: round(each, 2) for name, each in {**found, "ratio": ratio}.items()}


if __name__ == "__main__":
    main()
