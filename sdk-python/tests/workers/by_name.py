"""torch.distributed with nothing but the name of the backend: ronde is not imported here.

by_name.py BACKEND    calls init_process_group(BACKEND); `automatic` relies on RONDE_AUTOINIT=1 instead
"""

from __future__ import annotations

import subprocess
import sys

import torch
import torch.distributed as dist
from listening import listening

backend = sys.argv[1]
assert "ronde" not in sys.modules
if backend == "automatic":
    assert dist.is_initialized()
    # The group that exists is the one that these name.
    dist.init_process_group("ronde")
    dist.init_process_group("cpu:ronde")
    dist.init_process_group()
    try:
        dist.init_process_group("gloo")
    except ValueError as error:
        assert "RONDE_AUTOINIT=1 has made the default process group with the backend 'ronde'" in str(error), error
    else:
        raise AssertionError("a second backend was accepted")
    # A process that this one starts has its variables, but its rank is taken.
    child = "import torch.distributed as dist; print(dist.is_initialized())"
    assert subprocess.run([sys.executable, "-c", child], check=True, capture_output=True, text=True).stdout == "False\n"
elif backend.startswith("ronde://"):
    dist.init_process_group("ronde", init_method=backend)
else:
    dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
tensor = torch.full((3,), float(rank + 1))
dist.all_reduce(tensor)
assert tensor.tolist() == [size * (size + 1) / 2] * 3, tensor
print(f"rank {rank} of {size} has the sum over {dist.get_backend()} with {len(listening())} listeners", flush=True)
if backend != "automatic" or rank == 0:  # with the variable, a program may end without it
    dist.destroy_process_group()
    assert not dist.is_initialized()
