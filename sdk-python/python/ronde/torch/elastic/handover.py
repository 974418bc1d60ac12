"""Hands the tensors of a state over to the ranks that do not have them, from several of those that do.

Ranks that trained together have the same state, which they prove by a digest. Only the others receive it: from a rank
of their own sidecar through shared memory if there is one, else from ranks of several sidecars at once. A sidecar
receives each chunk once, whatever the number of its new workers. Receivers check the digest of each chunk.
"""

from __future__ import annotations

import functools
import hashlib
import logging
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import torch

from ronde.elastic.state import StateCorruptError
from ronde.errors import RefusedError
from ronde.frameworks import basics, process_sets, world
from ronde.frameworks.window import Window
from ronde.torch.elastic.chunks import DIGEST_BYTES, Chunk, Part, chunks_of, digest_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.client import Client
    from ronde.handle import Handle
    from ronde.process_set import ProcessSet

# More of them do not send faster than the sidecar of a new worker receives.
SOURCES_MAX = 8
_LISTED_MAX = 5
_log = logging.getLogger("ronde.elastic")


class Rank(NamedTuple):
    """What the others need to know of a rank.

    digest  -- that of its tensors; None if it does not have the state
    sidecar -- identifies its sidecar
    """

    digest: str | None
    sidecar: str


class Stream(NamedTuple):
    """Chunks that one rank sends to some others.

    source -- the rank that sends
    ranks  -- all of them, ascending
    chunks -- the numbers of the chunks, ascending
    """

    source: int
    ranks: tuple[int, ...]
    chunks: tuple[int, ...]


def hand_over(parts: Sequence[Part], has_state: bool) -> None:
    """Gives all ranks the tensors of rank 0. All ranks call it, with parts of the same names, types and shapes.

    has_state -- whether this rank has trained with the others, so that its tensors should be those of rank 0; ignored
                 on rank 0 itself

    Tensors of such a rank that differ from those of rank 0 are replaced, with a warning that names them unless they are
    buffers of modules. Besides the tensors, up to 64 MiB are in memory at once, and a copy of each tensor that is not
    contiguous. Raises StateCorruptError on a rank that received other bytes than rank 0 has, and what
    `Client.broadcast` does.
    """
    chunks = chunks_of(parts)
    try:
        _HandOver(chunks, has_state).run()
    finally:
        for part in parts:
            part.release()


def streams_of(ranks: Sequence[Rank], differing: Sequence[Sequence[int]], count: int) -> list[Stream]:
    """Returns the streams by which all ranks get all chunks that they do not have.

    differing -- for each rank, the chunks that it has otherwise than rank 0
    count     -- the number of chunks
    """
    others = set().union(*differing)
    holders = [rank for rank, each in enumerate(ranks) if each.digest is not None]
    if len(holders) == 1:
        return _streams(range(count), [0], range(len(ranks)))
    found = _streams(sorted(others), [0], range(len(ranks)))
    receivers = [rank for rank, each in enumerate(ranks) if each.digest is None]
    alike = [chunk for chunk in range(count) if chunk not in others]
    neighbours: dict[str, int] = {}
    for rank in holders:
        neighbours.setdefault(ranks[rank].sidecar, rank)
    for sidecar, source in neighbours.items():
        found += _streams(alike, [source], [rank for rank in receivers if ranks[rank].sidecar == sidecar])
    remote = [rank for rank in receivers if ranks[rank].sidecar not in neighbours]
    return found + _streams(alike, list(neighbours.values())[:SOURCES_MAX], remote)


def _streams(chunks: Sequence[int], sources: Sequence[int], receivers: Sequence[int]) -> list[Stream]:
    """Divides chunks among sources, in turns."""
    if not receivers:
        return []
    turns = [(source, tuple(chunks[turn :: len(sources)])) for turn, source in enumerate(sources)]
    return [Stream(source, tuple(sorted({source, *receivers})), own) for source, own in turns if own]


class _HandOver:
    """One hand-over, on one rank."""

    def __init__(self, chunks: Sequence[Chunk], has_state: bool) -> None:
        self._chunks, self._world = chunks, world.current()
        self._client, self._members = self._world.client, self._world.base
        self._rank = self._world.rank
        self._has_state = has_state or self._rank == 0
        self._expected: list[bytes] = []
        # What receivers submit: only its size counts.
        self._any = torch.zeros(max((chunk.nbytes for chunk in chunks), default=0), dtype=torch.uint8)
        self._changed: set[str] = set()

    def run(self) -> None:
        mine = [chunk.digest() for chunk in self._chunks] if self._has_state else []
        digest = hashlib.sha256(b"".join(mine)).hexdigest() if self._has_state else None
        ranks = [Rank(*each) for each in self._exchange([digest, basics.sidecar_id()], "ranks")]
        if not self._chunks or all(each.digest == ranks[0].digest for each in ranks):
            return
        self._expected = self._of_rank_0(mine)
        differing: list[list[int]] = [[] for _ in ranks]
        if any(each.digest not in (None, ranks[0].digest) for each in ranks):
            own = [number for number, each in enumerate(mine) if each != self._expected[number]]
            differing = self._exchange(own, "differences")
        self._transfer(self._possible(streams_of(ranks, differing, len(self._chunks))))
        self._report(differing)

    def _exchange(self, mine: Any, name: str) -> list[Any]:
        return process_sets.exchanged(self._client, mine, f"elastic.{name}", self._members)

    def _of_rank_0(self, mine: Sequence[bytes]) -> list[bytes]:
        """Returns the digests of rank 0's chunks on all ranks."""
        content = bytearray(b"".join(mine) or bytes(DIGEST_BYTES * len(self._chunks)))
        root, digests = self._world.job_ranks[0], torch.frombuffer(content, dtype=torch.uint8)
        received = self._client.broadcast(digests, root, "ronde.elastic.digests", process_set=self._members)
        joined = received.numpy().tobytes()
        return [joined[begin : begin + DIGEST_BYTES] for begin in range(0, len(joined), DIGEST_BYTES)]

    def _possible(self, streams: list[Stream]) -> list[Stream]:
        """Returns the streams, or others where ranks of the job that do not take part cannot make process sets."""
        if self._members is None:
            return streams
        chunks = sorted({chunk for stream in streams for chunk in stream.chunks})
        return _streams(chunks, [0], range(self._world.size))

    def _transfer(self, streams: Sequence[Stream]) -> None:
        """Sends and receives the chunks of this rank, in an order that is the same on all ranks."""
        sets = _Sets(self._client, self._world.size, [each.ranks for each in streams])
        window = Window()
        passed = sorted((number, each) for each in streams for number in each.chunks)
        for number, stream in passed:
            if self._rank in stream.ranks:
                members = sets.of(stream.ranks) or self._members
                begin = functools.partial(self._begin, number, stream, members)
                window.submit(self._chunks[number].nbytes, begin)
        window.finish()
        sets.remove()

    def _begin(self, number: int, stream: Stream, members: ProcessSet | None) -> _Transfer:
        """Begins to send or to receive a chunk."""
        chunk, is_source = self._chunks[number], self._rank == stream.source
        content = chunk.read() if is_source else self._any[: chunk.nbytes]
        root, name = self._world.job_ranks[stream.source], f"ronde.elastic.chunk.{number}"
        handle = self._client.broadcast_async(content, root, name, process_set=members)
        return _Transfer(handle, None if is_source else lambda received: self._take(number, received, stream.source))

    def _take(self, number: int, received: torch.Tensor, source: int) -> None:
        """Writes a chunk into its tensors, after checking it."""
        chunk = self._chunks[number]
        if digest_of(received) != self._expected[number]:
            names = list(dict.fromkeys(piece.part.name for piece in chunk.pieces))
            raise StateCorruptError(self._rank, source, _listed(names))
        if self._has_state and not chunk.is_buffer:
            self._changed.update(chunk.differing(received))
        chunk.write(received)

    def _report(self, differing: Sequence[Sequence[int]]) -> None:
        """Warns of ranks that trained something else, on rank 0 and on these ranks."""
        trained = {number for number, chunk in enumerate(self._chunks) if not chunk.is_buffer}
        others = [rank for rank, numbers in enumerate(differing) if trained.intersection(numbers)]
        if others and self._rank == 0:
            _log.warning(
                "the state of rank %s differs from that of rank 0 although they trained together, and has been "
                "replaced by it; the log of that rank names the tensors",
                ", ".join(map(str, others)),
            )
        elif self._rank in others:
            _log.warning(
                "the state of this worker, rank %d, differed from that of rank 0 although they trained together, and "
                "has been replaced by it: %s. Either only one of them had committed the last step, or this worker "
                "computes something else",
                self._rank,
                _listed(sorted(self._changed)),
            )


class _Sets:
    """The process sets of some streams. All ranks of the job make them.

    size    -- the number of ranks
    members -- the ranks of each stream
    """

    def __init__(self, client: Client, size: int, members: Sequence[tuple[int, ...]]) -> None:
        self._client = client
        self._sets: dict[tuple[int, ...], ProcessSet] = {}
        self._made: list[ProcessSet] = []
        pending = {ranks: client.add_process_set_async(ranks) for ranks in dict.fromkeys(members) if len(ranks) < size}
        for ranks, handle in pending.items():
            try:
                self._sets[ranks] = handle.wait()
                self._made.append(self._sets[ranks])
            except RefusedError:  # on all ranks: the program has made it already
                if client.rank in ranks:
                    self._sets[ranks] = client.add_process_set(ranks, members_only=True)

    def of(self, ranks: tuple[int, ...]) -> ProcessSet | None:
        """Returns the set of some ranks; None for that of all."""
        return self._sets.get(ranks)

    def remove(self) -> None:
        """Removes those that were not there before."""
        for each in self._made:
            self._client.remove_process_set(each)


class _Transfer:
    """A chunk in flight, and what follows its arrival."""

    def __init__(self, handle: Handle, take: Callable[[Any], None] | None) -> None:
        self._handle, self._take = handle, take

    def wait(self) -> None:
        received = self._handle.wait()
        if self._take is not None:
            self._take(received)


def _listed(names: Sequence[str]) -> str:
    more = f", and {len(names) - _LISTED_MAX} more" if len(names) > _LISTED_MAX else ""
    return ", ".join(names[:_LISTED_MAX]) + more
