"""Runs blocks of Horovod's documentation in one namespace: `seeds_program.py NAME...`, of the files in `seeds`.

It defines the names that they assume. Ray's address is in RAY_ADDRESS.
"""

from __future__ import annotations

import pathlib
import sys
from types import SimpleNamespace
from typing import Any

import horovod.torch as hvd
import ray
import torch
from horovod.ray import RayExecutor

EPOCHS, RANKS = 3, 2


def namespace() -> dict[str, Any]:
    """The names that the blocks assume."""
    weight = torch.nn.Parameter(torch.zeros(1))
    return {
        "__name__": "__main__",
        "ray": ray,
        "hvd": hvd,
        "setting": RayExecutor.create_settings(timeout_s=90),
        "num_workers": RANKS,
        "hosts": 1,
        "num_slots": RANKS,
        "Model": lambda: torch.nn.Linear(2, 1),
        "optimizer": torch.optim.SGD([weight], 0.1),
        "epochs": EPOCHS,
        "on_state_reset": print,
        # There is no GPU. The blocks use nothing else of PyTorch.
        "torch": SimpleNamespace(cuda=SimpleNamespace(set_device=abs)),
    }


def main() -> None:
    names = namespace()
    for name in sys.argv[1:]:
        path = pathlib.Path(__file__).parent / "seeds" / f"{name}.txt"
        exec(compile(path.read_text(), path, "exec"), names)
    print("done:", names.get("result"))


if __name__ == "__main__":
    main()
