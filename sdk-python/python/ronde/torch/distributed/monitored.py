"""The monitored barrier, whose error names the missing ranks. Its errors have the words of Gloo's."""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING

import torch

from ronde.errors import RondeError, TimedOutError

if TYPE_CHECKING:
    from ronde.torch.distributed.group import Group
    from ronde.torch.distributed.work import Operation

# The tag of its messages, which no program uses.
TAG = (1 << 32) - 1


def monitored_barrier(group: Group, timeout: datetime.timedelta, wait_all_ranks: bool) -> None:
    """Runs a barrier: rank 0 of the group receives a message from all others, and sends them the missing ranks.

    wait_all_ranks -- whether the error names all missing ranks, not only the first

    Raises RuntimeError if a rank is missing after the timeout.
    """
    if group.rank() == 0:
        _await_all(group, timeout, wait_all_ranks)
    else:
        _report(group, timeout)


def _await_all(group: Group, timeout: datetime.timedelta, wait_all_ranks: bool) -> None:
    """Receives a message from all other ranks, and answers those that have sent one."""
    missing = torch.zeros(group.size(), dtype=torch.uint8)
    if group.size() > 1 and timeout <= datetime.timedelta(0):
        raise RuntimeError("Rank 0 timed out in monitoredBarrier: its timeout is 0; give one that others can meet")
    _receive_from_all(group, timeout, wait_all_ranks, missing)
    # Do not wait for these sends if a rank is missing.
    works = [group.send([missing], rank, TAG) for rank in range(1, group.size()) if not missing[rank]]
    if not missing.any():
        for work in works:
            work.wait()
        return
    ranks = _text(missing)
    raise RuntimeError(f"{ranks} failed to pass monitoredBarrier in {_milliseconds(timeout)} ms")


def _report(group: Group, timeout: datetime.timedelta) -> None:
    """Sends rank 0 a message and waits for its answer, the missing ranks."""
    missing = torch.zeros(group.size(), dtype=torch.uint8)
    arrived = (
        f"Rank {group.rank()} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
        "from rank 0: "
    )
    # Rank 0 may begin to wait only when this rank's timeout ends.
    patience = max(2 * timeout, datetime.timedelta(milliseconds=1))
    try:
        group.send([missing[:1]], 0, TAG, patience)
        group.recv([missing], 0, TAG, patience).wait()
    except RondeError as error:
        raise RuntimeError(f"{arrived}{error}") from error
    if missing.any():
        raise RuntimeError(f"{arrived}{_text(missing)} failed to pass monitoredBarrier")


def _receive_from_all(group: Group, timeout: datetime.timedelta, wait_all_ranks: bool, missing: torch.Tensor) -> None:
    """Marks the ranks that have sent nothing."""
    until = time.monotonic() + timeout.total_seconds()
    received = torch.zeros(1, dtype=torch.uint8)
    works: list[Operation] = []
    try:
        works = [group.recv([received], rank, TAG, timeout) for rank in range(1, group.size())]
    except TimedOutError as error:  # the group's members have not all made it
        raise RuntimeError(f"Rank 0 timed out in monitoredBarrier: {error}") from error
    for rank, work in enumerate(works, 1):
        left = datetime.timedelta(seconds=max(0.001, until - time.monotonic()))
        try:
            work.wait(left)
        except TimedOutError:
            missing[rank] = 1
            if not wait_all_ranks:
                return


def _text(missing: torch.Tensor) -> str:
    ranks = missing.nonzero().flatten().tolist()
    return f"Rank{'s' if len(ranks) > 1 else ''} {', '.join(str(rank) for rank in ranks)}"


def _milliseconds(timeout: datetime.timedelta) -> int:
    return round(timeout.total_seconds() * 1000)
