"""Process sets of groups, which their members alone make.

PyTorch makes a group on its members only. A member submits the creation of the process set when PyTorch makes the
group, and waits for it before the first operation of the group. So members may make their groups in different orders.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ronde.errors import RondeError, TimedOutError

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
        # Held during the wait: threads that start the first operations of a group wait for one of them.
        self._lock = threading.Lock()

    def process_set(self, timeout_s: float) -> ProcessSet:
        """Returns the process set, after waiting for the other members to make the group.

        Raises TimedOutError after the timeout, and the errors of the creation. After a timeout it can be called again.
        """
        if self._existing is not None:
            return self._existing
        with self._lock:
            if self._existing is None:
                assert self._creation is not None, "a set that does not exist is being made"
                try:
                    self._existing = self._creation.wait(timeout_s)
                except TimeoutError as error:
                    text = (
                        f"some of the ranks {list(self.ranks)} have not made their group within {timeout_s:.3g} s, the "
                        "time that this operation had left; all members must call new_group with the same ranks"
                    )
                    raise TimedOutError(text, "operation") from error
                except RondeError:
                    self.is_failed = True
                    raise
        return self._existing


def made_by_members(client: Client, ranks: tuple[int, ...]) -> Members:
    """Begins to make the process set of these ranks, which this rank belongs to. Does not wait for other ranks."""
    return Members(ranks, None, client.add_process_set_async(ranks, members_only=True))
