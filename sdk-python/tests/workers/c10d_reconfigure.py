"""A process of a group that `reconfigure` gives other members. Processes exchange handles through a folder.

    c10d_reconfigure.py CASE NAME FOLDER MEMBERS...

MEMBERS are the names of the members in each phase, in the order of their ranks, as in `a,b,c`; a `+` after a name kills
that process at the end of the phase. A process takes part in the phases that name it.
"""

from __future__ import annotations

import datetime
import os
import pathlib
import signal
import socket
import sys
import time

import torch
import torch.distributed as dist

import ronde
import ronde.torch.distributed

CASE, NAME, FOLDER = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
PHASES = [members.split(",") for members in sys.argv[4:]]
STEPS = 3


def handle_of(name: str) -> str:
    """The handle of a member, when it has come."""
    path = FOLDER / name
    deadline = time.monotonic() + 150
    while not path.exists():
        assert time.monotonic() < deadline, f"{name} has not come"
        time.sleep(0.02)
    return path.read_text()


def publish(text: str) -> None:
    fresh = FOLDER / f".{NAME}"
    fresh.write_text(text)
    fresh.rename(FOLDER / NAME)


def listening() -> list[str]:
    """The TCP ports on which this process listens."""
    inodes = set()
    for link in pathlib.Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(link))
        except FileNotFoundError:
            continue
    tables = [pathlib.Path("/proc/self/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return [fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes]


def contribution(name: str, phase: int, step: int) -> torch.Tensor:
    return torch.arange(5, dtype=torch.float64) * (ord(name) % 31) + phase * STEPS + step


def weights_alone(last: int) -> torch.Tensor:
    """What one process computes for the members of all phases until `last`."""
    weights = torch.zeros(5, dtype=torch.float64)
    for phase, members in enumerate(PHASES[: last + 1]):
        for step in range(STEPS):
            weights += sum(contribution(name.strip("+"), phase, step) for name in members)
    return weights


def enter(phase: int, members: list[str], as_set: bool = False) -> None:
    handles = [handle_of(name) for name in members]
    before = dist.group.WORLD
    work = dist._reconfigure(phase + 1, set(handles) if as_set else handles, timeout=datetime.timedelta(seconds=60))
    assert work.wait()
    assert work.is_completed()
    assert dist.group.WORLD is before
    assert dist.get_world_size() == len(members)
    assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(len(members)))
    if not as_set:
        assert dist.get_rank() == members.index(NAME)


def train(phases: list[list[str]]) -> None:
    """Trains through all phases. Newcomers get the weights from the first member."""
    weights = torch.full((5,), -1.0, dtype=torch.float64)
    for phase, marked in enumerate(phases):
        members = [name.strip("+") for name in marked]
        if NAME not in members:
            continue
        enter(phase, members)
        if phase == 0:
            weights.zero_()
        dist.broadcast(weights, src=0)
        for step in range(STEPS):
            total = contribution(NAME, phase, step)
            dist.all_reduce(total)
            weights += total
        assert torch.equal(weights, weights_alone(phase)), (phase, weights)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
        model(torch.ones(2, 3)).sum().backward()
        part = dist.new_group([0, len(members) - 1])
        if dist.get_rank() in (0, len(members) - 1):
            dist.barrier(part)
        dist.barrier()
        if f"{NAME}+" in marked:
            os.kill(os.getpid(), signal.SIGKILL)
        if any("+" in name for name in marked):
            until_lost()
    assert listening() == [], listening()


def until_lost() -> None:
    pg = dist.group.WORLD
    assert pg.get_error() is not None
    try:
        while True:
            dist.all_reduce(torch.ones(1))
    except ronde.RondeError as error:
        print(f"{NAME} lost another: {error}", flush=True)


def expect(kind: type[Exception], text: str, call: object) -> None:
    try:
        call()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no error with {text!r}")


def errors() -> None:
    """What is wrong is named before anything changes, and the group works afterwards."""
    mine = dist._get_reconfigure_handle()
    expect(ronde.RondeError, "has no members yet", lambda: dist.all_reduce(torch.ones(1)))
    assert dist._supports_reconfigure()
    enter(0, [NAME])
    for text, uuid, handles, kind in [
        ("is not among the 1 of the new world", 10, [mine.replace(mine[8:16], "00000000")], ronde.RondeError),
        ("was given twice", 11, [mine, mine], ronde.RondeError),
        ("is no handle of ronde", 12, [mine, "gloo:0"], ronde.RondeError),
        ("is no handle of ronde", 13, [mine, "x" * 5000], ronde.RondeError),
        ("is no handle of ronde", 14, [mine, "[" * 4000], ronde.RondeError),
        ("1 to 4096 handles", 15, [], ronde.RondeError),
        ("has been used by this group", 1, [mine], ValueError),
    ]:
        expect(kind, text, lambda uuid=uuid, handles=handles: dist._reconfigure(uuid, handles))
        total = torch.ones(1)
        dist.all_reduce(total)  # the former members are there
    other = mine.replace(mine[8:16], "00000000")
    short = datetime.timedelta(seconds=10)
    for rank, handles in enumerate(([other, mine], [mine, other])):
        text = f"rank {rank} of 2 has not come within 10 s"
        expect(ronde.TimedOutError, text, lambda r=rank, h=handles: dist._reconfigure(20 + r, h, timeout=short))
    expect(ronde.RondeError, "has been reconfigured: call reconfigure before", lambda: dist.all_reduce(torch.ones(1)))
    assert dist.group.WORLD.get_error() == torch._C._distributed_c10d.ErrorType.COMM_ERROR
    enter(29, [NAME], as_set=True)
    dist.group.WORLD.abort()
    expect(ronde.RondeError, "was aborted", lambda: dist.all_reduce(torch.ones(1)))
    enter(30, [NAME])
    assert dist.group.WORLD.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS
    dist.barrier()


def without_credentials() -> None:
    handles = [handle_of(name) for name in PHASES[0]]
    expect(ronde.RondeError, "RONDE_SIDECAR_JOB_SECRET_FILE", lambda: dist._reconfigure(1, handles))


def refused() -> None:
    handles = [handle_of(name) for name in PHASES[0]]
    try:
        dist._reconfigure(1, handles, timeout=datetime.timedelta(seconds=8))
    except ronde.RondeError as error:
        print(f"{NAME} does not begin: {error}", flush=True)
    else:
        raise AssertionError("hosts with different secrets have begun a session")


dist.init_process_group("ronde", store=dist.HashStore(), rank=0, world_size=1, enable_reconfigure=True)
publish(dist._get_reconfigure_handle())
{
    "train": lambda: train(PHASES),
    "errors": errors,
    "without_credentials": without_credentials,
    "refused": refused,
}[CASE]()
dist.destroy_process_group()
print(f"{NAME} on {socket.gethostname()} is done", flush=True)
