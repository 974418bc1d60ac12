"""Run by every rank: a thousand consecutive sessions leak no resources, here and in the sidecar."""

from __future__ import annotations

import gc
import os
import pathlib
import sys
import time
from typing import Any

import torch

import ronde.torch as hvd

# `RONDE_ROUNDS=1000` is what is promised; a tenth of it shows a leak as well.
ROUNDS = int(os.environ.get("RONDE_ROUNDS", "100"))
WARM_UP = 20
QUIET_WITHIN_S = 20.0


def holdings(pid: int) -> dict[str, int]:
    """What a process has."""
    process = pathlib.Path(f"/proc/{pid}")
    descriptors = []
    for entry in (process / "fd").iterdir():
        try:
            descriptors.append(os.readlink(entry))
        except OSError:
            continue  # the one that lists them
    maps = (process / "maps").read_text()
    return {
        "threads": len(list((process / "task").iterdir())),
        "descriptors": len(descriptors),
        "sockets": sum(name.startswith("socket:") for name in descriptors),
        "memory files": sum("memfd" in name for name in descriptors),
        "shared mappings": maps.count("memfd"),
    }


def sidecars() -> list[int]:
    """The sidecars of this job: processes with this one's launcher as their ancestor."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"sidecar" in command and launcher_of(int(entry.name)) == launcher_of(os.getpid()):
            found.append(int(entry.name))
    assert found, "this job has no sidecar"
    return found


def launcher_of(pid: int) -> int:
    """The outermost ancestor whose program is ronde."""
    outermost = 0
    while pid > 1:
        try:
            status = pathlib.Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            break
        if status.partition("(")[2].rpartition(")")[0] == "ronde":
            outermost = pid
        pid = int(status.rpartition(")")[2].split()[1])
    return outermost


def growth(pid: int, was: dict[str, int]) -> dict[str, Any]:
    """What a process has more of than it had, beyond what comes and goes with a session."""
    now = holdings(pid)
    grown: dict[str, Any] = {name: (was[name], now[name]) for name in was if now[name] > was[name] + 2}
    return {**grown, "process": pid} if grown else {}


def one_round(number: int) -> None:
    """A session with a small tensor, a large one, and a process set."""
    hvd.init(process_sets=[hvd.ProcessSet([0])])
    total = hvd.allreduce(torch.full((4,), float(number)), op=hvd.Sum)
    assert total[0] == number * hvd.size()
    kept = hvd.allreduce(torch.full((50_000,), 1.0), op=hvd.Sum, name="large")
    hvd.barrier()
    hvd.shutdown()
    assert kept[-1] == kept[0], "a result outlives its session"


def main() -> None:
    """Counts after some rounds and after all of them."""
    torch.set_num_threads(1)
    for number in range(WARM_UP):
        one_round(number)
    gc.collect()
    pids = [os.getpid(), *sidecars()]
    before = [holdings(pid) for pid in pids]
    for number in range(ROUNDS):
        one_round(number)
    gc.collect()
    deadline = time.monotonic() + QUIET_WITHIN_S
    # The sidecar closes what the last session had while this process goes on.
    while (grown := [found for found in map(growth, pids, before) if found]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not grown, f"there is more than before: {grown}"
    # Not by another session, which the sidecar would have while another rank still counts.
    print(f"rank {os.environ['RONDE_RANK']}: {ROUNDS} sessions leaked no resources")


if __name__ == "__main__":
    sys.exit(main())
