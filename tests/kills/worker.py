"""A worker that trains a perceptron and appends a line for each step to a file.

    worker.py FILE PARAMETERS COMMIT_EVERY

Before a step is recorded, all ranks compare a digest of their weights. The job ends when the file FILE.stop exists.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

import ronde.torch as hvd
import torch

BATCH = 8


def model_of(parameters: int) -> torch.nn.Module:
    """A perceptron of about so many parameters in five square layers."""
    width = int((parameters / 5) ** 0.5)
    layers: list[torch.nn.Module] = []
    for _ in range(5):
        layers += [torch.nn.Linear(width, width, bias=False), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def main() -> None:
    """Trains until the end is requested."""
    file, parameters, commit_every = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(hvd.rank())
    model = model_of(parameters)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.001), named_parameters=model.named_parameters()
    )
    state = hvd.elastic.TorchState(model, optimizer, step=0)
    inputs = torch.ones(BATCH, next(model.parameters()).shape[1])
    output = file.open("ab", buffering=0)

    def note(event: str) -> None:
        words = [event, time.monotonic(), os.environ["RONDE_WORKER"], os.getpid(), hvd.rank(), hvd.size(), state.step]
        output.write((" ".join(map(str, words)) + "\n").encode())

    state.register_reset_callbacks([lambda: note("continue")])
    note("begin")

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState) -> None:
        while True:
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
            state.step += 1
            weights = torch.stack([weight.detach().double().sum() for weight in model.parameters()])
            everybody = hvd.allgather(
                torch.cat([weights, torch.tensor([float(state.step)], dtype=torch.float64)])[None]
            )
            if not bool((everybody == everybody[0]).all()):
                note("different")
                raise SystemExit("the ranks have different weights or steps")
            note("step")
            if hvd.broadcast_object(pathlib.Path(f"{file}.stop").exists(), root_rank=0):
                return
            if state.step % commit_every == 0:
                state.commit()
                note("commit")
            else:
                state.check_host_updates()

    train(state)
    hvd.shutdown()


if __name__ == "__main__":
    main()
