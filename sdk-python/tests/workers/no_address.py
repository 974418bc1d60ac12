"""A group of Gloo in a job whose launcher names no address for PyTorch's store. Prints the error."""

from __future__ import annotations

import torch.distributed as dist

dist.init_process_group("ronde")
try:
    dist.new_group(backend="gloo")
except RuntimeError as error:
    print(error, flush=True)
dist.destroy_process_group()
