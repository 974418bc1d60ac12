"""A replica of a model that torchft's Manager keeps equal to others, over ronde.

    replica.py NAME LIGHTHOUSE STEPS FOLDER

Writes a line for each committed step, and its weights in the end. After a step for which the folder has a
file, such as hold-4, it waits until that file is gone.
"""

from __future__ import annotations

import datetime
import pathlib
import sys
import time

import torch
import torch.distributed as dist
from ronde.torch.torchft import ProcessGroupRonde
from torchft import DistributedDataParallel, Manager, Optimizer
from torchft.checkpointing.pg_transport import PGTransport

NAME, LIGHTHOUSE, STEPS, FOLDER = sys.argv[1], sys.argv[2], int(sys.argv[3]), pathlib.Path(sys.argv[4])
TIMEOUT = datetime.timedelta(seconds=30)


def rows(step: int) -> torch.Tensor:
    """The rows of a step. Both replicas have the same, so that any number of them computes the same weights."""
    return torch.arange(32, dtype=torch.float32).reshape(8, 4).sin() + step / 10


def main() -> None:
    """Trains until the last step is committed."""
    torch.manual_seed(ord(NAME))  # replicas begin with different weights
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def load(state: dict) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def save() -> dict:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupRonde(timeout=TIMEOUT)
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load,
        state_dict=save,
        replica_id=NAME,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=LIGHTHOUSE,
        hostname="127.0.0.1",
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        use_async_quorum=False,
        checkpoint_transport=PGTransport(group, timeout=TIMEOUT, device=torch.device("cpu")),
    )
    wrapped, stepper = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    print(f"{NAME} begins", flush=True)
    while manager.current_step() < STEPS:
        while (FOLDER / f"hold-{manager.current_step()}").exists():
            time.sleep(0.05)
        stepper.zero_grad()
        step = manager.current_step()
        wrapped(rows(step)).square().mean().backward()
        stepper.step()
        if manager.current_step() > step:
            print(f"{NAME} has committed step {manager.current_step()} with {manager.num_participants()}", flush=True)
    torch.save(save(), FOLDER / f"{NAME}.pt")
    manager.shutdown(wait=False)
    group.shutdown()


main()
