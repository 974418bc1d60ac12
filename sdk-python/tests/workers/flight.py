"""Run by every rank: one rank does not submit a name that the others wait for, and then does what the argument says."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time

import numpy
import own_sidecar

import ronde

PATIENCE_S = 120
# Shorter than the tests wait, so that they show the reason.
OTHERS_S = 60


def wait_for(marker: pathlib.Path) -> None:
    """Waits until a file exists."""
    deadline = time.monotonic() + PATIENCE_S
    while not marker.exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def await_others(client: ronde.Client) -> None:
    """Waits until all other ranks have submitted what this rank does not."""
    others = {(rank, "allreduce.layer4.weight") for rank in range(client.size) if rank != client.rank}
    deadline = time.monotonic() + OTHERS_S
    while missing := others - own_sidecar.pending(*own_sidecar.pages()):
        assert time.monotonic() < deadline, f"never submitted: {missing}"
        time.sleep(0.05)


def stay_away(client: ronde.Client, mode: str, marker: pathlib.Path) -> None:
    """Does what the missing rank does instead of the operation."""
    if mode in ("hang", "stall", "timeout"):
        wait_for(marker)
        return
    await_others(client)
    if mode == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "kill-sidecar":
        os.kill(own_sidecar.process(), signal.SIGKILL)
    # And "leave" ends well.


def time_out(client: ronde.Client, marker: pathlib.Path) -> None:
    """Waits in vain twice, and stays until the file exists."""
    for _ in range(2):
        try:
            client.allreduce(numpy.ones(4), name="layer4.weight")
        except ronde.RondeError as error:
            print("failed:", type(error).__name__, flush=True)
    marker.with_name(f"timed-out-{client.rank}").touch()
    wait_for(marker)


def main() -> None:
    """All ranks agree on some names; then the missing rank stays away until the file exists, or dies.

    With equal steps, the names are those of a schedule.
    """
    mode, missing, marker = sys.argv[1], int(sys.argv[2]), pathlib.Path(sys.argv[3])
    steps = int(sys.argv[4]) if len(sys.argv) > 4 else 0
    client = ronde.connect()
    for step in range(3):
        client.allreduce(numpy.ones(4), name=f"layer{step}.weight")
    # Steps of small operations only are negotiated.
    weight = numpy.ones(100_000 if steps else 4)
    for _ in range(steps):
        client.allreduce(weight, name="layer4.weight")
        client.allreduce(numpy.ones(4), name="layer4.bias")  # the last of a step
    if steps == 0:
        client.allreduce(numpy.ones(4), name="layer3.bias")  # the last call
    if client.rank == missing:
        stay_away(client, mode, marker)
        if mode in ("timeout", "leave"):
            return
    if mode == "timeout":
        time_out(client, marker)
        return
    try:
        client.allreduce(weight, name="layer4.weight")  # the wait
    except ronde.RondeError as error:
        print("failed:", type(error).__name__, flush=True)
        if mode == "stall":
            raise
    print("is done", flush=True)


main()
