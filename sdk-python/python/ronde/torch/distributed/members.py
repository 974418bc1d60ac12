"""Process sets of groups, which their members alone make.

PyTorch makes a group on its members only. A member submits the creation of the process set when PyTorch makes the
group, and waits for it before the first operation of the group. So members may make their groups in different orders.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Callable

from ronde.errors import RondeError, TimedOutError
from ronde.torch.distributed.work import ABORT_INTERVAL_S

if TYPE_CHECKING:
    from ronde.client import Client
    from ronde.handle import Handle
    from ronde.process_set import ProcessSet


class Members:
    """The process set of a group's ranks, which exists as soon as all members have made the group.

    ranks -- ranks of the job, ascending
    """

    def __init__(self, ranks: tuple[int, ...], existing: ProcessSet | None, creation: Handle | None = None) -> None:
        self.ranks = ranks
        self._existing = existing
        self._creation = creation
        self.is_failed = False  # a later group of these ranks makes another one
        # Held during a slice of the wait. Several groups of these ranks, and several threads, may wait at once.
        self._lock = threading.Lock()

    def process_set(self, deadline: float, check: Callable[[], None]) -> ProcessSet:
        """Returns the process set, after waiting for the other members to make the group.

        deadline -- of the monotonic clock
        check    -- called again and again during the wait; an error that it raises ends the wait

        Raises TimedOutError after the deadline, and the errors of the creation. After a timeout it can be called again.
        """
        timeout_s = max(0.0, deadline - time.monotonic())
        while self._existing is None:
            check()
            left = max(0.0, deadline - time.monotonic())
            self._wait(min(left, ABORT_INTERVAL_S))
            if self._existing is None and left == 0:
                raise TimedOutError(
                    f"some of the ranks {list(self.ranks)} have not made their group within {timeout_s:.3g} s, the "
                    "time that this operation had left; all members must call new_group with the same ranks",
                    "operation",
                )
        return self._existing

    def _wait(self, timeout_s: float) -> None:
        """Waits until the process set exists, until another thread has waited, or for the timeout."""
        assert self._creation is not None, "a set that does not exist is being made"
        if not self._lock.acquire(timeout=timeout_s):
            return
        try:
            if self._existing is None:
                self._existing = self._creation.wait(timeout_s)
        except TimeoutError:
            pass  # the caller waits again
        except RondeError:
            self.is_failed = True
            raise
        finally:
            self._lock.release()


def made_by_members(client: Client, ranks: tuple[int, ...]) -> Members:
    """Begins to make the process set of these ranks, which this rank belongs to. Does not wait for other ranks."""
    return Members(ranks, None, client.add_process_set_async(ranks, members_only=True))
