"""Measures how long PyTorch takes to make groups with ronde and with Gloo: `python -m ronde.bench.creation`.

Ranks are processes of this host. Each figure is that of the slowest rank; the table has the median of the rounds. A
group is made and used once, as backends may put off their work to the first operation.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from ronde import command

# The figures, in the order of the table.
FIGURES = ("init_process_group", "new_group", "new_group and its first all-reduce", "another all-reduce")
_TIMEOUT_S = 300
_GROUPS = 10


def _meet(folder: str, rank: int, size: int) -> None:
    """Waits until all ranks have imported PyTorch, which takes longer on some of them. Raises TimeoutError."""
    pathlib.Path(folder, f"ready{rank}").touch()
    until = time.monotonic() + _TIMEOUT_S
    while missing := [each for each in range(size) if not pathlib.Path(folder, f"ready{each}").exists()]:
        if time.monotonic() > until:
            raise TimeoutError(f"ranks {missing} have not started within {_TIMEOUT_S} s")
        time.sleep(0.001)


def measure_rank(backend: str, folder: str, way: str, rank: int, size: int) -> dict[str, float]:
    """Measures on one rank, in seconds.

    folder -- shared by the ranks, empty at first
    way    -- "file" for a store there; "run" leaves rank, size and address to the environment
    """
    import torch
    import torch.distributed as dist

    import ronde.torch.distributed  # noqa: F401

    times: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    _meet(folder, rank, size)
    begun = time.perf_counter()
    if way == "file":
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=size)
    else:
        dist.init_process_group(backend)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    times[FIGURES[0]].append(time.perf_counter() - begun)
    for _ in range(_GROUPS):
        dist.barrier()
        begun = time.perf_counter()
        group: Any = dist.new_group(list(range(size)))
        times[FIGURES[1]].append(time.perf_counter() - begun)
        dist.all_reduce(tensor, group=group)
        times[FIGURES[2]].append(time.perf_counter() - begun)
        dist.barrier()
        begun = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        times[FIGURES[3]].append(time.perf_counter() - begun)
    dist.barrier()
    dist.destroy_process_group()
    return {figure: statistics.median(each) for figure, each in times.items()}


def measure(way: str, backend: str, size: int) -> dict[str, float]:
    """Measures one world. Raises RuntimeError if it fails.

    way -- "file" for a store of PyTorch, "run" for `ronde run`
    """
    with tempfile.TemporaryDirectory() as folder:
        results = [pathlib.Path(folder, f"rank{rank}") for rank in range(size)]
        rank_command = [sys.executable, "-m", "ronde.bench.creation", "--rank-of", folder, "--backend", backend]
        rank_command += ["--size", str(size)]
        if way == "run":
            launch = [command.find(), "run", "-np", str(size), *rank_command]
            processes = [subprocess.Popen(launch, stdout=subprocess.DEVNULL)]
        else:
            ranks = [[*rank_command, "--rank", str(rank)] for rank in range(size)]
            processes = [subprocess.Popen(each, stdout=subprocess.DEVNULL) for each in ranks]
        try:
            statuses = [process.wait(_TIMEOUT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(statuses):
            raise RuntimeError(f"{backend}, {way}, {size} ranks: processes ended with {statuses}")
        measured = [json.loads(path.read_text()) for path in results]
    return {figure: max(each[figure] for each in measured) for figure in FIGURES}


def main() -> int:
    """Measures all worlds and prints a table, or measures as one rank of one."""
    parser = argparse.ArgumentParser(description="Measures how long groups of torch.distributed take to make.")
    parser.add_argument("--sizes", default="2,4", help="numbers of ranks")
    parser.add_argument("--rounds", type=int, default=3, help="how often each world is made")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of is not None:
        way, rank = ("run", int(os.environ["RONDE_RANK"])) if given.rank is None else ("file", given.rank)
        measured = measure_rank(given.backend, given.rank_of, way, rank, given.size)
        pathlib.Path(given.rank_of, f"rank{rank}").write_text(json.dumps(measured))
        return 0
    print(f"| ranks | backend | {' | '.join(FIGURES)} |")
    print(f"|---|---|{'---|' * len(FIGURES)}")
    for size in (int(text) for text in given.sizes.split(",")):
        for name, way, backend in [
            ("Gloo, file:// store", "file", "gloo"),
            ("ronde, file:// store", "file", "ronde"),
            ("ronde, ronde run", "run", "ronde"),
        ]:
            rounds = [measure(way, backend, size) for _ in range(given.rounds)]
            medians = [statistics.median(each[figure] for each in rounds) for figure in FIGURES]
            print(f"| {size} | {name} | {' | '.join(f'{1000 * each:.2f} ms' for each in medians)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
