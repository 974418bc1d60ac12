"""A driver on the first of two hosts: `hosts_program.py ADDRESS CASE [PATH]`. Prints a line of JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ronde.errors import RondeError
from ronde.ray import RayExecutor

# As float32 in the tensors of all ranks; their sum is found in no argument.
MARK = 12345.678


def reduce() -> dict[str, Any]:
    import os
    import socket

    import ronde.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.full((100_000,), float(os.environ["MARK"])), op=hvd.Sum)
    found = {"sum": float(total[0]), "same": bool((total == total[0]).all()), "host": socket.gethostname()}
    found["rank"], found["secrets"] = hvd.rank(), [name for name in os.environ if "SECRET" in name]
    hvd.shutdown()
    return found


def static(**credentials: Any) -> Any:
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60, **credentials), num_hosts=2)
    executor.start(extra_env_vars={"MARK": str(MARK)})
    found = executor.run(reduce)
    executor.shutdown()
    return found


def elastic(function: Any = reduce, *arguments: Any) -> Any:
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), min_workers=4, max_workers=4)
    executor.start(extra_env_vars={"MARK": str(MARK)})
    return executor.run(function, args=arguments)


def sleep(folder: str) -> None:
    """Leaves a file with the name of its process, and does not end."""
    import os
    import pathlib
    import time

    import ronde.torch as hvd

    hvd.init()
    pathlib.Path(folder, str(os.getpid())).touch()
    time.sleep(600)


def main() -> None:
    address, case, *path = sys.argv[1:]
    ray.init(address=address, log_to_driver=False)
    try:
        if case == "killed":
            found = elastic(sleep, *path)
        else:
            found = elastic() if case == "elastic" else static(**({case: path[0]} if path else {}))
    except RondeError as error:
        found = {"error": str(error), "cause": error.cause}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
