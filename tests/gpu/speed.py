"""Run by each rank: how long all-reduces on a GPU take. Rank 0 prints figures, and each result is checked.

python speed.py ronde DEVICE | python speed.py gloo|nccl DEVICE STORE, where DEVICE is "cuda" or, to try the script,
"cpu"
"""

from __future__ import annotations

import functools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterable
from typing import Callable

import torch
import torch.distributed

BYTES = [1 << 20, 64 << 20]
WARM, TIMED = 3, 10


def figure(title: str, text: str) -> None:
    """Prints a figure for the table."""
    print(f"FIGURE {json.dumps([title, text])}", flush=True)


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, act: Callable[[], object]) -> float:
    """Returns the median time of an act, with the work that it begins."""
    times = []
    for _ in range(WARM + TIMED):
        synchronize(device)
        start = time.perf_counter()
        act()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM:])


def reduce(tensor: torch.Tensor) -> None:
    """Adds all ranks' ones."""
    tensor.fill_(1.0)
    torch.distributed.all_reduce(tensor)


def measure(backend: str, device: torch.device, size: int, rank: int) -> None:
    """Times all-reduces in place, and checks what they give."""
    for nbytes in BYTES:
        tensor = torch.ones(nbytes // 4, device=device)
        took = seconds(device, functools.partial(reduce, tensor))
        assert bool((tensor == size).all()), "a wrong sum"
        if rank == 0:
            figure(
                f"all-reduce of {nbytes >> 20} MB, {backend}", f"{took * 1e3:.2f} ms, {nbytes / took / 1e9:.2f} GB/s"
            )


def measure_bus(device: torch.device) -> None:
    """Times copies from and to page-locked memory, which no staging can exceed."""
    tensor = torch.ones(BYTES[-1] // 4, device=device)
    pinned = torch.empty(BYTES[-1] // 4, pin_memory=True)
    for title, act in [
        ("bus, to the host", lambda: pinned.copy_(tensor, non_blocking=True)),
        ("bus, to the GPU", lambda: tensor.copy_(pinned, non_blocking=True)),
    ]:
        figure(title, f"{BYTES[-1] / seconds(device, act) / 1e9:.2f} GB/s")


def choose_interface(names: Iterable[str]) -> None:
    """In a network namespace of the tests Gloo and NCCL use its link to the other one."""
    for name in names:
        if name.startswith("v") and name[1:].isdigit():
            os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = name


def main() -> None:
    """Makes a group, and measures."""
    backend, kind = sys.argv[1:3]
    choose_interface(name for _, name in socket.if_nameindex())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if backend != "ronde":
        torch.distributed.init_process_group(backend, init_method=f"file://{sys.argv[3]}", rank=rank, world_size=size)
    else:
        import ronde.torch.distributed  # noqa: F401  registers the backend

        torch.distributed.init_process_group("ronde")
    measure(backend, device, size, rank)
    if backend == "ronde" and rank == 0 and kind == "cuda":
        measure_bus(device)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
