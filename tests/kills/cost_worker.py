"""A worker that trains a perceptron for some steps and writes how long each took.

    cost_worker.py FOLDER PARAMETERS STEPS WAY

WAY is "fixed" for a loop without a state, "checks" for an elastic one that asks for changes after each step, "commits"
for one that commits after each step.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time

import ronde.torch as hvd
import torch
from worker import BATCH, model_of

WARM_UP = 3


def main() -> None:
    """Trains."""
    folder, parameters, steps, way = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(0)
    model = model_of(parameters)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.001), named_parameters=model.named_parameters()
    )
    inputs = torch.ones(BATCH, next(model.parameters()).shape[1])
    times: list[float] = []

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    def train(state: hvd.elastic.TorchState | None) -> None:
        for _ in range(WARM_UP + steps):
            began = time.perf_counter()
            step()
            if state is not None and way == "checks":
                state.check_host_updates()
            elif state is not None:
                state.commit()
            times.append(time.perf_counter() - began)

    if way == "fixed":
        train(None)
    else:
        hvd.elastic.run(train)(hvd.elastic.TorchState(model, optimizer))
    (folder / f"{hvd.rank()}").write_text(json.dumps(times[WARM_UP:]))
    hvd.shutdown()


if __name__ == "__main__":
    main()
