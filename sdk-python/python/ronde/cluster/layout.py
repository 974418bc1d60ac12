"""Where the ranks run, which of them share a sidecar, and which numbers each of them has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.processes import HostIdentity

# What PyTorch calls the numbers of a rank.
_TORCH_NAMES = {"RANK": "RANK", "SIZE": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_WORLD_SIZE"}


@dataclass(frozen=True)
class Place:
    """Where a worker runs, as it reports itself.

    node     -- the engine's ID of its node; "" if the engine has none
    address  -- the address by which the engine's nodes reach that node
    host     -- its host's name, boot and network namespace
    user     -- its effective user ID
    pid      -- its process ID
    gpus     -- the IDs of the GPUs that the engine has given it
    has_tls  -- whether its connections of the engine use TLS
    """

    node: str
    address: str
    host: HostIdentity
    user: int
    pid: int
    gpus: tuple[str, ...] = ()
    has_tls: bool = False

    def shares_sidecar(self, other: Place) -> bool:
        """Returns whether one sidecar can serve both: they have one node, network namespace and user."""
        return self.node == other.node and self.user == other.user and self.host.is_same(other.host)

    def described(self) -> str:
        """Returns the place for a message."""
        return f"node {self.host.name} ({self.address}), process {self.pid}"


class Numbers(NamedTuple):
    """The numbers of a rank, as Horovod defines them.

    local_rank, local_size -- among the ranks of its sidecar
    cross_rank, cross_size -- among the ranks of other sidecars with the same local rank
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int

    def variables(self) -> dict[str, str]:
        """Returns the variables by which ronde, Horovod's programs and PyTorch find the numbers."""
        found = {}
        for field, number in self._asdict().items():
            name, text = field.upper(), str(number)
            found.update({f"RONDE_{name}": text, f"HOROVOD_{name}": text})
            if name in _TORCH_NAMES:
                found[_TORCH_NAMES[name]] = text
        return found


class Layout:
    """The ranks of each sidecar.

    places  -- of all workers, by rank
    sharing -- for each sidecar, its ranks in ascending order; ordered by the lowest rank
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = tuple(places)
        self.sharing: list[list[int]] = []
        for rank, place in enumerate(places):
            mine = next((ranks for ranks in self.sharing if place.shares_sidecar(places[ranks[0]])), None)
            if mine is None:
                self.sharing.append([rank])
            else:
                mine.append(rank)

    def placement(self) -> list[int]:
        """Returns the index of each rank's sidecar."""
        found = [0] * len(self.places)
        for index, ranks in enumerate(self.sharing):
            for rank in ranks:
                found[rank] = index
        return found

    def numbers(self, rank: int) -> Numbers:
        """Returns the numbers of a rank."""
        index = self.placement()[rank]
        ranks = self.sharing[index]
        local_rank = ranks.index(rank)
        across = [each for each, others in enumerate(self.sharing) if len(others) > local_rank]
        return Numbers(rank, len(self.places), local_rank, len(ranks), across.index(index), len(across))

    def gpus(self, rank: int) -> str:
        """Returns the GPUs of all ranks of this rank's sidecar, in their order, as CUDA_VISIBLE_DEVICES lists them."""
        found: list[str] = []
        for each in self.sharing[self.placement()[rank]]:
            found += [gpu for gpu in self.places[each].gpus if gpu not in found]
        return ",".join(found)

    def reordered(self, order: Sequence[int]) -> Layout:
        """Returns the layout whose rank r is this layout's rank `order[r]`."""
        return Layout([self.places[each] for each in order])


def by_node(places: Sequence[Place]) -> list[int]:
    """Returns the workers in the order of their ranks: those that share a sidecar have consecutive ones."""
    return [worker for workers in Layout(places).sharing for worker in workers]
