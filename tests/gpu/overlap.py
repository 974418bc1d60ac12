"""Run by each rank: what share of the copies to the host happens while kernels run, and what a step of DDP costs.

python overlap.py DEVICE, which is "cuda" or, to try the script, "cpu", where nothing is copied
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterable

import ronde.torch.distributed  # noqa: F401  registers the backend
import torch
import torch.distributed
from torch.profiler import ProfilerActivity, profile

WIDTH, DEPTH, BATCH = 1024, 8, 64
WARM, TIMED = 3, 10
Span = tuple[float, float]


def figure(title: str, text: str) -> None:
    """Prints a figure for the table."""
    print(f"FIGURE {json.dumps([title, text])}", flush=True)


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same times without overlaps, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def share_within(spans: Iterable[Span], others: Iterable[Span]) -> float:
    """The share of some times during which others happen, from 0 to 1; 0 of no time."""
    mine, theirs = merged(spans), merged(others)
    total = sum(end - start for start, end in mine)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in mine for b in theirs)
    return both / total if total else 0.0


def model(device: torch.device) -> torch.nn.Module:
    """The same weights in each process: 34 MB of gradients, in several buckets."""
    torch.manual_seed(1)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    return torch.nn.Sequential(*layers).to(device)


def step(net: torch.nn.Module, batch: torch.Tensor) -> None:
    """Computes gradients; DDP reduces them meanwhile."""
    net.zero_grad(set_to_none=True)
    net(batch).square().mean().backward()
    if batch.is_cuda:
        torch.cuda.synchronize(batch.device)


def milliseconds(net: torch.nn.Module, batch: torch.Tensor) -> float:
    """The median time of a step."""
    times = []
    for _ in range(WARM + TIMED):
        start = time.perf_counter()
        step(net, batch)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times[WARM:])


def device_spans(net: torch.nn.Module, batch: torch.Tensor) -> tuple[list[Span], list[Span]]:
    """The times of copies to the host and of kernels in a step, as the profiler saw them on the device."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if batch.is_cuda else [])]
    with profile(activities=activities) as profiled:
        step(net, batch)
    copies: list[Span] = []
    kernels: list[Span] = []
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            is_copy = event.name.startswith("Memcpy DtoH")
            if is_copy or not event.name.startswith("Mem"):
                (copies if is_copy else kernels).append((event.time_range.start, event.time_range.end))
    return copies, kernels


def main() -> None:
    """Measures a step alone and with DDP."""
    kind = sys.argv[1]
    torch.distributed.init_process_group("ronde")
    rank = torch.distributed.get_rank()
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    batch = torch.randn(BATCH, WIDTH, device=device)
    alone = milliseconds(model(device), batch)
    net = torch.nn.parallel.DistributedDataParallel(model(device), bucket_cap_mb=4)
    together = milliseconds(net, batch)
    copies, kernels = device_spans(net, batch)
    if rank == 0:
        figure("step alone, and with DDP", f"{alone:.2f} ms, {together:.2f} ms, {together / alone:.2f}x")
        if kind == "cuda":
            assert copies, "the profiler saw no copy to the host"
            figure("copies to the host while kernels run", f"{100 * share_within(copies, kernels):.0f} %")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
