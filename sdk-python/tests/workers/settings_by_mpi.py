"""Run by mpirun: prints the effect of Horovod's variables on rank 0's sidecar, as JSON."""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
import time
import urllib.request

import torch

import ronde.torch as hvd
from ronde import own_sidecar, without_launcher

STEPS, TENSORS = 60, 20


def main() -> None:
    """Groups of tensors, step by step; then what was done with them. With a stall shutdown time, a stall alone."""
    torch.set_num_threads(1)
    hvd.init()
    if os.environ.get("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"):
        # Nothing else: on a busy machine the short time might pass in any other operation.
        stall()
        return
    for _ in range(STEPS):
        hvd.grouped_allreduce([torch.ones(4096) for _ in range(TENSORS)], op=hvd.Sum, name="step")
    hvd.barrier()
    if hvd.rank() == 0:
        print("found", json.dumps(found()), flush=True)
    hvd.barrier()


def found() -> dict[str, object]:
    """What the sidecar counts, and the cores that it may use."""
    directory = os.environ.get("RONDE_SOCKET") or shared_sidecar()
    address = (pathlib.Path(directory) / "admin").read_text().strip()
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        text = answer.read().decode()
    counts = {name: float(re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)[0]) for name in COUNTS}
    cores = [sorted(os.sched_getaffinity(each.process.pid)) for each in own_sidecar._started.sidecars]
    return {**counts, "cores": cores[0] if cores else []}


def shared_sidecar() -> str:
    """The session directory of the sidecar that rank 0 has started."""
    assert without_launcher._own.shared is not None
    return without_launcher._own.shared.socket


def stall() -> None:
    """Rank 1 submits nothing until rank 0's wait has ended with an error."""
    if hvd.rank() == 0:
        try:
            hvd.allreduce(torch.ones(1), name="alone")
        except hvd.HorovodInternalError as error:
            print("stalled", str(error).replace("\n", " "), flush=True)
            return
        raise AssertionError("a tensor for which nobody waits was reduced")
    while hvd.client().is_open:
        time.sleep(0.02)


COUNTS = ["ronde_fused_tensors_total", "ronde_operations_scheduled_total"]

if __name__ == "__main__":
    sys.exit(main())
