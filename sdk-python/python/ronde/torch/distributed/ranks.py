"""The ranks of a group, and functions that submit its operations."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar, cast

import torch

from ronde.submission import read_nothing
from ronde.torch.distributed.elements import input_of
from ronde.torch.distributed.uneven import Checked, dimension_of
from ronde.torch.distributed.work import InFlight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.client import Client
    from ronde.process_set import ProcessSet
    from ronde.tensors import Source
    from ronde.torch.distributed.elements import Read
    from ronde.torch.distributed.members import Members

# Submits an operation under a name, if one is given.
Start = Callable[[Optional[str], bool], InFlight]
_Each = TypeVar("_Each")
# The label of the first group of some ranks.
_DEFAULT = "c10d.0"
_TAGS = 1 << 32
_WITH_ROOT = ("broadcast", "gather", "reduce", "scatter")


class Ranks:
    """The ranks of a group as a process set, and functions that submit its operations.

    A `start` takes a name, and whether to count the completion if no thread waits for it, and submits an operation.

    order -- ranks of the job in the order of the group. A process set is ordered by rank, so that the rank's number
             within the group, `me`, may differ from that within the process set, `position`.
    label -- distinguishes this group from others of the same ranks
    """

    def __init__(self, client: Client, members: Members, order: Sequence[int], label: str) -> None:
        self.client = client
        self.members = members
        self.order = list(order)
        self.size = len(self.order)
        self.me = self.order.index(client.rank)
        self.position = members.ranks.index(client.rank)
        self.is_sorted = self.order == list(members.ranks)
        self._process_set: ProcessSet | None = None
        self._abortion: Exception | None = None
        # Of the ranks of the group, where each is in the process set.
        self._positions = [members.ranks.index(rank) for rank in self.order]
        # Messages have no name, so tags distinguish those of groups with the same ranks.
        is_default = label == _DEFAULT and self.size == client.size
        digest = hashlib.sha256(f"{members.ranks} {label}".encode()).digest()
        self._first_tag = 0 if is_default else int.from_bytes(digest[:4], "big")

    def meet(self, deadline: float) -> None:
        """Waits until all members have made the group.

        deadline -- of the monotonic clock

        Raises TimedOutError after it, the errors of the creation of the group, and the error of `abort`.
        """
        self._check_abortion()
        if self._process_set is None:
            self._process_set = self.members.process_set(deadline, self._check_abortion)

    def abort(self, error: Exception) -> None:
        """Ends the wait of threads that wait for the members, and makes later calls of `meet` raise the error."""
        self._abortion = error

    def _check_abortion(self) -> None:
        if self._abortion is not None:
            raise self._abortion

    @property
    def _set(self) -> ProcessSet:
        assert self._process_set is not None, "operations are submitted after `meet`"
        return self._process_set

    def in_job(self, rank: int) -> int:
        """Returns the job's rank of a rank in the group. Raises ValueError for one that the group does not have."""
        if not 0 <= rank < self.size:
            raise ValueError(f"invalid rank {rank}: the group has ranks 0 to {self.size - 1}")
        return self.order[rank]

    def index_of(self, rank: int) -> int:
        """Returns the rank in the group of a rank of the job."""
        return self.order.index(rank)

    def in_set_order(self, each: Sequence[_Each]) -> Sequence[_Each]:
        """Returns what belongs to the ranks of the group, in its order, in the order of the process set."""
        if self.is_sorted or len(each) != self.size:
            return each
        return [each[self.order.index(rank)] for rank in self.members.ranks]

    def rows_in_order(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the elements of all ranks, as many of each and in the order of the process set, in the group's."""
        parts = whole.reshape(self.size, whole.numel() // self.size)
        return torch.cat([parts[position] for position in self._positions])

    def refusal(self, kind: str) -> Start:
        """Returns the start of a request that matches none of the others', so that they get an error and do not wait.

        It names this rank as the root, and another shape and type than theirs in any case.
        """
        nothing = input_of(torch.empty(0, dtype=torch.uint8), self.size, 0, 0, 0, 0, 0)
        options: dict[str, Any] = {"root": self.client.rank} if kind in _WITH_ROOT else {}
        return self.tensor(kind, nothing, read_nothing, **options)

    def tensor(self, kind: str, source: Source, read: Read, mapped: bool = False, **options: Any) -> Start:
        """Returns the start of an operation on a tensor.

        mapped -- whether the result may stay in shared memory, which `read` must support
        """

        def start(name: str | None, notify: bool) -> InFlight:
            submit = self.client._submit
            return submit(kind, source, name, self._set, read=read, notify=notify, mapped=mapped, **options)

        return start

    def group(
        self, kind: str, sources: Sequence[Source], reads: Sequence[Read], mapped: bool = False, **options: Any
    ) -> Start:
        """Returns the start of an operation on several tensors."""
        options = {**options, "mapped": mapped}

        def start(name: str | None, notify: bool) -> InFlight:
            return self.client._submit_group(kind, sources, name, self._set, reads=reads, notify=notify, **options)

        return start

    def request(self, kind: str, read: Read, **options: Any) -> Start:
        """Returns the start of an operation to which this rank contributes no tensor."""
        return lambda name, notify: self.client._request(kind, read, name, self._set, notify=notify, **options)

    def message(self, kind: str, source: Source | None, read: Read, rank: int, tag: int) -> Start:
        """Returns the start of a message to or from another rank, which has no name."""
        client, options = (
            self.client,
            cast("dict[str, Any]", {"root": self.in_job(rank), "tag": self.tag(tag), "notify": True}),
        )
        if source is None:
            return lambda name, notify: client._request(kind, read, None, self._set, **options)
        return lambda name, notify: client._submit(kind, source, None, self._set, read=read, mapped=False, **options)

    def tag(self, tag: int) -> int:
        """Returns the tag by which the members match messages that have this tag in the group.

        Raises ValueError for a tag that is negative or does not fit 32 bits.
        """
        if not 0 <= tag < _TAGS:
            raise ValueError(f"the tag {tag} is not from 0 to {_TAGS - 1}; give one that is")
        return (self._first_tag + tag) % _TAGS

    def checked(self, agreed: Any, check: Start, data: Start) -> Start:
        """Returns the start of two operations, the first of which fails if `agreed` differs between ranks."""
        number = dimension_of(agreed)

        def start(name: str | None, notify: bool) -> InFlight:
            return Checked(check(name, notify), data(f"{name}.{number:x}", notify))

        return start
