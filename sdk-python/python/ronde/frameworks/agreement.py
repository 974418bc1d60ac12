"""How ranks of an elastic training agree, without a framework: by small operations on arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy

from ronde.elastic.state import ObjectState
from ronde.frameworks import objects, process_sets, world
from ronde.ops import Max

if TYPE_CHECKING:
    from ronde.client import Client
    from ronde.process_set import ProcessSet


class AgreeingState(ObjectState):
    """A state of plain objects, on the session of `init`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(self._object_of_rank_0, self._rank_here, **kwargs)

    def _client(self) -> Client:
        """Returns the client of the session."""
        return world.current().client

    def _members(self) -> ProcessSet | None:
        """Returns the ranks that train together; None for all of the job."""
        return process_sets.members_of(process_sets.global_process_set)

    def _rank_here(self) -> int:
        members = self._members()
        return self._client().rank if members is None else members.rank()

    def _root(self) -> int:
        """Returns rank 0 of those that train together, as a rank of the job."""
        members = self._members()
        return 0 if members is None else members.ranks[0]

    def _is_alone(self) -> bool:
        members = self._members()
        return (self._client().size if members is None else members.size()) == 1

    def _object_of_rank_0(self, obj: Any) -> Any:
        return objects.broadcast_by(self._client(), self._members(), obj, self._root(), "ronde.elastic.objects")

    def agree_on_state(self, has_state: bool) -> bool:
        """Returns on all ranks whether rank 0, the oldest worker, has the state of the training."""
        if self._is_alone():
            return has_state
        flag = numpy.array([int(has_state)], dtype=numpy.int32)
        found = self._client().broadcast(flag, self._root(), "ronde.elastic.has_state", process_set=self._members())
        return bool(found[0])

    def agree_on_sync(self, needed: bool) -> bool:
        """Returns on all ranks whether any of them needs to synchronize."""
        if self._is_alone():
            return needed
        return bool(self._maximum([int(needed)], "ronde.elastic.needs_sync")[0])

    def wait_for_all(self) -> None:
        """Waits until all ranks have called this."""
        if not self._is_alone():
            self._client().barrier("ronde.elastic.wait_for_all", process_set=self._members())

    def _replays_operations(self) -> bool:
        return self._client().replay is not None

    def _of_all_ranks(self, changes: int) -> int:
        """Returns the changes of all ranks together, by one small operation, because each commit needs it."""
        bits = [changes >> bit & 1 for bit in range(3)]
        if not self._is_alone():
            bits = self._maximum(bits, "ronde.elastic.changes")
        return sum(flag << bit for bit, flag in enumerate(bits))

    def _maximum(self, numbers: list[int], name: str) -> list[int]:
        """Returns the greatest number of all ranks, for each of these."""
        given = numpy.array(numbers, dtype=numpy.int32)
        found: list[int] = self._client().allreduce(given, Max, name, process_set=self._members()).tolist()
        return found

    def _of_rank_0(self, previous: float, latest: float, changes: int) -> tuple[float, float, int]:
        """Returns the values of rank 0 on all ranks, by one small operation, because each commit needs it."""
        if self._is_alone():
            return previous, latest, changes
        values = numpy.array([previous, latest, changes], dtype=numpy.float64)
        found = self._client().broadcast(values, self._root(), "ronde.elastic.hosts", process_set=self._members())
        previous, latest, bits = found.tolist()
        return previous, latest, int(bits)
