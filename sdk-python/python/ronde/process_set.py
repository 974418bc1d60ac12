"""Process sets: subsets of a job's ranks that perform collectives among themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class ProcessSet:
    """A process set, as `Client.add_process_set` and `Client.global_process_set` return it.

    id    -- its number, 0 for the set of all ranks; None once it is removed
    ranks -- its ranks in the job, ascending
    """

    def __init__(self, number: int, ranks: Iterable[int], me: int) -> None:
        self.id: int | None = number
        self.ranks = sorted(ranks)
        self._me = me

    def size(self) -> int:
        """The number of its ranks."""
        return len(self.ranks)

    def rank(self) -> int:
        """This worker's number among its ranks, from 0. Raises ValueError if this worker is not in it."""
        if not self.included():
            raise ValueError(f"rank {self._me} is not part of provided process set {self}")
        return self.ranks.index(self._me)

    def included(self) -> bool:
        """Whether this worker is in it."""
        return self._me in self.ranks

    def __repr__(self) -> str:
        return f"ProcessSet(id={self.id}, ranks={self.ranks})"
