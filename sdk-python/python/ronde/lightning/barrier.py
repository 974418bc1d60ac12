"""Replaces the Gloo group that Lightning opens while data is prepared.

Lightning lets other ranks wait for `prepare_data` in a group of the backend Gloo, whatever the default group is. Gloo
listens on a TCP port and does not encrypt.
"""

from __future__ import annotations

import datetime
import functools
from typing import Any

import torch.distributed
from lightning.fabric.utilities import distributed as fabric

import ronde.torch.distributed
from ronde.lightning.session import is_over_ronde

# How long ranks wait for the one that prepares data. Lightning waits for ever.
PREPARE_TIMEOUT = datetime.timedelta(days=1)


def replace_gloo_barrier() -> None:
    """Makes Lightning's barrier a group of the backend "ronde" where that is the default group's. Idempotent."""
    barrier: Any = fabric._InfiniteBarrier
    plain = barrier.__enter__
    if getattr(plain, "is_ronde", False):
        return

    @functools.wraps(plain)
    def enter(self: Any) -> Any:
        if not is_over_ronde():
            return plain(self)
        self.group = ronde.torch.distributed.new_group(timeout=PREPARE_TIMEOUT)
        self.barrier = functools.partial(torch.distributed.barrier, self.group)
        return self

    enter.is_ronde = True  # type: ignore[attr-defined]
    barrier.__enter__ = enter
