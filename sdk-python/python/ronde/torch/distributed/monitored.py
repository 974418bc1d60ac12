"""The monitored barrier, whose error names the missing ranks."""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING

import torch

from ronde.errors import TimedOutError

if TYPE_CHECKING:
    from ronde.torch.distributed.group import Group

# The tag of its messages, which no program uses.
TAG = (1 << 32) - 1


def monitored_barrier(group: Group, timeout: datetime.timedelta, wait_all_ranks: bool) -> None:
    """Runs a barrier: rank 0 of the group receives a message from all others, and sends them the missing ranks.

    wait_all_ranks -- whether the error names all missing ranks, not only the first

    Raises RuntimeError if a rank is missing after the timeout.
    """
    missing = torch.zeros(group.size(), dtype=torch.uint8)
    if group.rank() == 0:
        _receive_from_all(group, timeout, wait_all_ranks, missing)
        # Answer the ranks that have arrived. Do not wait for these sends if a rank is missing.
        works = [group.send([missing], rank, TAG) for rank in range(1, group.size()) if not missing[rank]]
        if not missing.any():
            for work in works:
                work.wait()
    else:
        group.send([missing[:1]], 0, TAG, timeout)
        try:
            # Rank 0 may begin to wait only when this rank's timeout ends.
            group.recv([missing], 0, TAG, 2 * timeout).wait()
        except TimedOutError as error:
            raise RuntimeError(f"monitored_barrier: rank 0 has not answered within {2 * timeout}: {error}") from error
    if missing.any():
        ranks = ", ".join(str(rank) for rank in missing.nonzero().flatten().tolist())
        raise RuntimeError(f"monitored_barrier: these ranks of the group have not come within {timeout}: {ranks}")


def _receive_from_all(group: Group, timeout: datetime.timedelta, wait_all_ranks: bool, missing: torch.Tensor) -> None:
    """Marks the ranks that have sent nothing."""
    until = time.monotonic() + timeout.total_seconds()
    received = torch.zeros(1, dtype=torch.uint8)
    works = [group.recv([received], rank, TAG, timeout) for rank in range(1, group.size())]
    for rank, work in enumerate(works, 1):
        left = datetime.timedelta(seconds=max(0.001, until - time.monotonic()))
        try:
            work.wait(left)
        except TimedOutError:
            missing[rank] = 1
            if not wait_all_ranks:
                return
