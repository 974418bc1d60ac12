"""The measured cases: worlds, collectives, sizes, repetitions."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from ronde.bench.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

KB = 1 << 10
MB = 1 << 20
ELEMENT_BYTES = 4  # float32, the type of gradients
COLLECTIVES = ("allreduce", "allgather", "broadcast", "reduce_scatter", "alltoall")
RANKS_MAX = 64


@dataclasses.dataclass(frozen=True)
class World:
    """A number of ranks on a number of hosts. Hosts are this machine, or network namespaces of it."""

    hosts: int
    ranks: int

    @property
    def ranks_per_host(self) -> int:
        """The number of ranks on each host."""
        return self.ranks // self.hosts

    def title(self) -> str:
        """The title in tables and messages."""
        return f"{'one host' if self.hosts == 1 else f'{self.hosts} hosts'}, {self.ranks} ranks"

    def bytes_sent(self, collective: str) -> float:
        """Returns the bytes that cross between two hosts in both directions, for each byte of one rank's tensor.

        The tensor is the larger of input and result. Raises ValueError for more than two hosts.
        """
        if self.hosts > 2:
            raise ValueError(f"bytes between {self.hosts} hosts depend on the algorithm")
        both_directions = {"allreduce": 2.0, "broadcast": 1.0, "allgather": 1.0, "reduce_scatter": 1.0}
        # Half of each rank's tensor goes to the other host.
        both_directions["alltoall"] = self.ranks / 2
        return both_directions[collective] if self.hosts == 2 else 0.0


@dataclasses.dataclass(frozen=True)
class Case:
    """One collective at one size.

    nbytes     -- bytes of the larger of input and result at one rank
    iterations -- timed iterations in each backend's turn
    rounds     -- turns of each backend
    loops      -- turns without barriers, which measure CPU time
    warm_up    -- untimed iterations before the first timed one, checked as well
    """

    collective: str
    nbytes: int
    iterations: int
    rounds: int
    loops: int
    warm_up: int = 2

    def count(self, ranks: int) -> int:
        """Returns the elements of the larger of input and result; divisible by the ranks if ranks divide them."""
        count = max(1, self.nbytes // ELEMENT_BYTES)
        return count if self.collective in ("allreduce", "broadcast") else max(1, count // ranks) * ranks

    def title(self) -> str:
        """The title in tables and messages."""
        return f"{self.collective} {size_text(self.nbytes)}"


@dataclasses.dataclass(frozen=True)
class Extent:
    """The extent of a run: --quick, the default or --full.

    allreduce_sizes, other_sizes -- bytes
    rounds, loops                -- as in `Case`
    share                        -- iterations of a turn, as a share of the default's
    train_rounds                 -- turns of each training mode, of `TRAIN_STEPS` steps
    """

    allreduce_sizes: tuple[int, ...]
    other_sizes: tuple[int, ...]
    ranks: tuple[int, ...]
    hosts: tuple[int, ...]
    rounds: int
    loops: int
    share: float
    train_rounds: int


QUICK = Extent((4, 4 * KB, 64 * KB, MB, 16 * MB), (64 * KB,), (2, 4), (1,), 3, 1, 0.5, 2)
DEFAULT = Extent(
    (4, KB, 4 * KB, 64 * KB, MB, 16 * MB, 64 * MB, 256 * MB), (4 * KB, MB, 16 * MB), (2, 4), (1, 2), 5, 2, 1.0, 5
)
FULL = Extent(
    tuple(4**power for power in range(1, 15)), (4 * KB, 64 * KB, MB, 16 * MB, 64 * MB), (2, 4), (1, 2), 11, 4, 1.5, 11
)
TRAIN_STEPS = 3


def cases(
    extent: Extent, collectives: Iterable[str] = COLLECTIVES, sizes: Sequence[int] = (), rounds: int | None = None
) -> list[Case]:
    """Returns the cases of one world; `sizes` in bytes replace those of the extent."""
    found = []
    for collective in collectives:
        own = extent.allreduce_sizes if collective == "allreduce" else extent.other_sizes
        for nbytes in sizes or own:
            iterations = max(1, round(_iterations(nbytes) * extent.share))
            # Repeat cases that take seconds less often.
            is_huge = nbytes > 64 * MB
            turns = rounds or (extent.rounds // 2 + 1 if is_huge else extent.rounds)
            loops = min(turns, 1 if is_huge else extent.loops)
            found.append(Case(collective, nbytes, iterations, turns, loops, 1 if nbytes > MB else 2))
    return found


def parse_size(text: str) -> int:
    """Parses a size such as `4`, `64KB`, `16MB` to bytes; units are powers of 1,024."""
    found = re.fullmatch(r"(\d{1,12})\s*([KM]?)B?", text.strip().upper())
    nbytes = int(found[1]) * {"": 1, "K": KB, "M": MB}[found[2]] if found else 0
    if nbytes < ELEMENT_BYTES:
        raise UsageError(f"{text!r} is no size of at least {ELEMENT_BYTES} bytes: give 4, 64KB or 16MB")
    return nbytes


def size_text(nbytes: int) -> str:
    """Formats bytes with a unit."""
    for unit, factor in (("MB", MB), ("KB", KB)):
        if nbytes >= factor:
            return f"{nbytes / factor:.4g} {unit}"
    return f"{nbytes} B"


def _iterations(nbytes: int) -> int:
    for limit, iterations in ((64 * KB, 40), (MB, 12), (16 * MB, 4), (64 * MB, 2)):
        if nbytes <= limit:
            return iterations
    return 1
