"""Run by every rank: random cases of every collective, type and reduction against NumPy, twice, all of them in flight.

All ranks draw the same cases, and each other's tensors, from the seed; `--order` decides the order in which each rank
submits them. What was found is written to rank-N.json in the folder for the parent, which compares ranks and runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import pathlib
import random
from typing import Any

import numpy
from numpy_reference import CODECS, TYPES, Expected, reduction, rounded

import ronde

Array = Any
OPS = {
    "average": ronde.Average,
    "sum": ronde.Sum,
    "adasum": ronde.Adasum,
    "min": ronde.Min,
    "max": ronde.Max,
    "product": ronde.Product,
    "median": ronde.Median,
    "clipped_mean": ronde.ClippedMean,
    "bit_and": ronde.BitAnd,
    "bit_or": ronde.BitOr,
    "bit_xor": ronde.BitXor,
}
WHOLE = ("adasum", "median", "clipped_mean")  # see all ranks' tensors at once
BITWISE = ("bit_and", "bit_or", "bit_xor")
GROUP_TENSORS = 3
# What reduces nothing.
MOVING = (
    "allgather",
    "grouped_allgather",
    "broadcast",
    "grouped_broadcast",
    "alltoall",
    "gather",
    "scatter",
    "message",
)
# Elements of the few tensors that are cut into several chunks. Of the longest type they still fit a message.
LARGE = 120_011


@dataclasses.dataclass(frozen=True)
class Combination:
    """What has to be covered: a collective with a type and, where it reduces, a reduction and a codec."""

    collective: str
    dtype: str
    op: str = ""
    codec: str | None = None

    def __str__(self) -> str:
        return "/".join(part for part in (self.collective, self.dtype, self.op, self.codec) if part)


@dataclasses.dataclass
class Case:
    """One operation of some ranks, as all of them know it."""

    number: int
    name: str
    what: Combination
    members: list[int]
    group: int  # the process set, by its place among the job's
    shapes: list[tuple[int, ...]]  # of the tensors: one, or those of a group; rows are by member where they may differ
    rows: list[int]  # by member
    splits: list[list[int]]  # by member, then by receiver
    root: int
    to: int
    scales: tuple[float, float]
    style: str
    tag: int

    def tensors(self, rank: int) -> list[Array]:
        """What a rank contributes, as NumPy holds it."""
        draw = numpy.random.default_rng([self.number, rank, len(self.members)])
        return [values(draw, self.what, self.style, self.shape(index, rank)) for index in range(len(self.shapes))]

    def shape(self, index: int, rank: int) -> tuple[int, ...]:
        """The shape of a rank's tensor."""
        shape, place = self.shapes[index], self.members.index(rank)
        if self.what.collective in ("allgather", "grouped_allgather", "gather"):
            return (self.rows[(place + index) % len(self.rows)], *shape)
        if self.what.collective == "alltoall":
            return (sum(self.splits[place]), *shape)
        return shape


def values(draw: numpy.random.Generator, what: Combination, style: str, shape: tuple[int, ...]) -> Array:
    """Random elements: whole ranges of integers, numbers that do not overflow, or some that are special."""
    kind = TYPES[what.dtype]
    if kind.kind == "b":
        return numpy.asarray(draw.integers(0, 2, shape), dtype=bool)
    if kind.kind == "i":
        limits = numpy.iinfo(what.dtype)
        low, high = (limits.min, limits.max) if style == "full" else (max(limits.min, -3), 4)
        return numpy.asarray(draw.integers(low, high, shape, dtype=what.dtype, endpoint=True))
    if what.op == "product":
        array = draw.uniform(0.75, 1.5, shape) * draw.choice([-1.0, 1.0], shape)
    else:
        array = draw.normal(0.0, 10.0 ** draw.uniform(-1.0, 1.0), shape)
    if style == "special":
        special = draw.choice([numpy.nan, numpy.inf, -numpy.inf, 0.0, -0.0], shape)
        array = numpy.where(draw.random(shape) < 0.1, special, array)
    return rounded(kind, array)


def combinations() -> list[Combination]:
    """Everything that ronde performs."""
    found = []
    for dtype in TYPES:
        for collective in ("allreduce", "grouped_allreduce", "reduce_scatter", "grouped_reduce_scatter", "reduce"):
            found += [Combination(collective, dtype, op) for op in ops(collective, dtype)]
        for collective in MOVING:
            found.append(Combination(collective, dtype))
    for codec in CODECS:
        for op in ("sum", "average"):
            found += [Combination(each, "float32", op, codec) for each in ("allreduce", "grouped_allreduce")]
    return [*found, Combination("barrier", "uint8")]


def joined_combinations() -> list[Combination]:
    """What goes on while some ranks have joined."""
    found = [
        Combination("allreduce", dtype, op)
        for dtype in TYPES
        for op in ops("allreduce", dtype)
        if op in ("sum", "average", "adasum")
    ]
    found += [Combination("allreduce", "float32", op, codec) for op in ("sum", "average") for codec in CODECS]
    return [*found, Combination("barrier", "uint8")]


def ops(collective: str, dtype: str) -> list[str]:
    """The reductions that a collective has of a type."""
    kind = TYPES[dtype].kind
    whole = kind == "f" and collective in ("allreduce", "grouped_allreduce")
    refused = {"average"} if kind == "b" else set(BITWISE) if kind == "f" else set()
    return [op for op in OPS if op not in refused and (op not in WHOLE or whole)]


class Deck:
    """Draws cases."""

    def __init__(self, seed: int, size: int, sets: list[list[int]]) -> None:
        self.draw = random.Random(f"{seed} {size} {len(sets)}")
        self.base = self.draw.randrange(1 << 40)
        self.sets = sets
        self.count = 0

    def case(self, what: Combination, group: int = 0, name: str | None = None) -> Case:
        """A case of this combination on one of the sets."""
        draw, members = self.draw, self.sets[group]
        n, scales, style = len(members), (1.0, 1.0), draw.choice(["small", "full"])
        if what.op and draw.random() < 0.4:
            factors = [0.75, 1.25] if what.op == "product" else [0.5, 2.0, -1.0, 0.3, 1.7]
            scales = (draw.choice([1.0, *factors]), draw.choice([1.0, 0.5, 3.0, -0.25, 1.1]))
        if what.op not in ("adasum", "clipped_mean") and what.codec is None and draw.random() < 0.2:
            style = "special"
        self.count += 1
        root, to = draw.sample(members, 2) if n > 1 else (members[0], members[0])
        return Case(
            number=self.base + self.count,
            name=name or f"case {self.count}",
            what=what,
            members=members,
            group=group,
            shapes=[self.shape(what, n) for _ in range(GROUP_TENSORS if what.collective.startswith("grouped") else 1)],
            rows=[draw.choice([0, 1, 2, 5, n]) for _ in members],
            splits=[[draw.choice([0, 0, 1, 2, 7]) for _ in members] for _ in members],
            root=root,
            to=to,
            scales=scales,
            style=style,
            tag=self.count,
        )

    def shape(self, what: Combination, n: int) -> tuple[int, ...]:
        """A shape, or what follows the rows where those differ between ranks."""
        rest = self.draw.choice([(), (), (1,), (3,), (2, 2), (0,)])
        if what.collective in ("allgather", "grouped_allgather", "gather", "alltoall"):
            return rest
        rows = self.draw.choice([0, 1, n - 1, n, n + 1, 2 * n + 1, 13, 257])
        if self.draw.random() < 0.01:
            return (LARGE,)
        if self.draw.random() < 0.1 and what.collective in ("allreduce", "broadcast", "reduce", "message"):
            return ()
        return (rows, *rest)


def submit(client: ronde.Client, case: Case, sets: list[ronde.ProcessSet]) -> Any:
    """This rank's part of a case, in flight."""
    what, some = case.what, {"process_set": sets[case.group]} if case.group else {}
    if what.collective == "barrier":
        return client.barrier_async(case.name, **some)
    if what.collective == "message" and client.rank == case.to:
        return client.recv_async(case.root, case.tag, **some)
    tensors = [native(what.dtype, tensor) for tensor in case.tensors(client.rank)]
    mine = tensors if what.collective.startswith("grouped") else tensors[0]
    if what.collective == "message":
        return client.send_async(mine, case.to, case.tag, **some)
    if what.collective == "scatter" and client.rank != case.root:
        mine = None
    if what.op:
        some.update(op=OPS[what.op], prescale_factor=case.scales[0], postscale_factor=case.scales[1])
    if what.codec:
        some["codec"] = what.codec
    if what.collective in ("broadcast", "grouped_broadcast", "reduce", "gather", "scatter"):
        some["root_rank"] = case.root
    if what.collective == "alltoall":
        some["splits"] = case.splits[case.members.index(client.rank)]
    return getattr(client, what.collective + "_async")(mine, name=case.name, **some)


def expected(case: Case, me: int, absent: frozenset[int] = frozenset()) -> list[Expected] | None:
    """What NumPy gives this rank; None for no result. Ranks that are absent contribute zeros."""
    what = case.what
    tensors = {rank: case.tensors(rank) for rank in case.members}
    for rank in absent:
        tensors[rank] = [numpy.zeros_like(tensor) for tensor in tensors[rank]]
    columns = [[tensors[rank][index] for rank in case.members] for index in range(len(case.shapes))]
    place, at_root = case.members.index(me), me == case.root
    if what.op and (what.collective != "reduce" or at_root):
        whole = [reduction(what.op, what.dtype, column, *case.scales, what.codec) for column in columns]
        return [rows_of(each, case, place) for each in whole] if "scatter" in what.collective else whole
    if what.collective in ("allgather", "grouped_allgather") or (what.collective == "gather" and at_root):
        return [Expected(numpy.concatenate(column)) for column in columns]
    if what.collective in ("broadcast", "grouped_broadcast") or (what.collective == "message" and me == case.to):
        return [Expected(tensor) for tensor in tensors[case.root]]
    if what.collective == "scatter":
        return [rows_of(Expected(tensors[case.root][0]), case, place)]
    if what.collective == "alltoall":
        starts = [sum(splits[:place]) for splits in case.splits]
        ends = [start + splits[place] for start, splits in zip(starts, case.splits)]
        return [Expected(numpy.concatenate([part[a:b] for part, a, b in zip(columns[0], starts, ends)]))]
    return None


def rows_of(whole: Expected, case: Case, place: int) -> Expected:
    """The rows of a member: the first of them get one more."""
    each, more = divmod(len(whole.values), len(case.members))
    start = place * each + min(place, more)
    return whole.rows(start, start + each + (place < more))


def native(dtype: str, tensor: Array) -> Any:
    """A tensor as the client takes it."""
    return ronde.Bfloat16.from_float32(tensor) if dtype == "bfloat16" else tensor


def held(dtype: str, result: Any) -> Array:
    """A result as NumPy holds it."""
    if dtype == "bfloat16":
        assert isinstance(result, ronde.Bfloat16), type(result)
        return numpy.asarray(result.to_float32())
    assert result.dtype.name == dtype, result.dtype
    return result


class Findings:
    """A rank's report to the parent."""

    def __init__(self) -> None:
        self.covered: dict[str, int] = {}
        self.worst: dict[str, float] = {}  # of each combination, in bounds
        self.digests: dict[str, str] = {}  # of each case with a result

    def note(self, case: Case, result: Any, want: list[Expected] | None) -> None:
        """Checks a result; fails with the case when it is not as NumPy has it."""
        what = case.what
        if what.collective == "alltoall":
            result, received = result
            mine = case.members.index(self.rank)
            assert received.tolist() == [splits[mine] for splits in case.splits], (case, received)
        results = result if what.collective.startswith("grouped") else [result]
        if want is None:
            assert result is None, (case, result)
        else:
            arrays = [held(what.dtype, each) for each in results]
            excess = max(each.excess(array) for each, array in zip(want, arrays))
            assert excess <= 1.0, f"{excess} bounds off: {case}\n{arrays}\nby NumPy {want}"
            self.worst[str(what)] = max(self.worst.get(str(what), 0.0), excess)
        self.covered[str(what)] = self.covered.get(str(what), 0) + 1
        if digest := digest_of(result):
            self.digests[f"{case.group}/{case.name}/{what}"] = digest

    rank = 0


def digest_of(result: Any) -> str | None:
    """A result's bits, with shape and type; None for no result."""
    if result is None:
        return None
    parts = []
    for each in result if isinstance(result, (list, tuple)) else [result]:
        array = each.bits if isinstance(each, ronde.Bfloat16) else each
        parts.append(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return hashlib.sha256(b"|".join(parts)).hexdigest()[:16]


def check_sets(client: ronde.Client) -> tuple[list[list[int]], list[ronde.ProcessSet]]:
    """Creates process sets and removes some: freed numbers are reused in the order of removal."""
    size = client.size
    whole = list(range(size))
    if size == 1:
        return [whole], [client.global_process_set]
    added = [client.add_process_set([rank]) for rank in whole[:2]]
    numbers = [each.id for each in added]
    assert all(client.remove_process_set(each) for each in reversed(added))
    groups = [whole[::2], whole[size // 2 :], whole[:-1]]
    distinct = [group for index, group in enumerate(groups) if group not in groups[:index]]
    sets = [client.add_process_set(reversed(group)) for group in distinct]
    assert [each.id for each in sets][:2] == numbers[::-1][: len(sets)], (numbers, sets)
    return [whole, *distinct], [client.global_process_set, *sets]


def draw_cases(seed: int, groups: list[list[int]]) -> list[Case]:
    """Every combination on all ranks, and some of every collective on each set, under the same names."""
    deck = Deck(seed, len(groups[0]), groups)
    everything = [what for what in combinations() if len(groups[0]) > 1 or what.collective != "message"]
    cases = [deck.case(what) for what in everything]
    collectives = sorted({what.collective for what in everything})
    for collective in collectives:
        choices = [what for what in everything if what.collective == collective]
        for group, members in enumerate(groups):
            if len(members) > 1 or collective != "message":
                cases.append(deck.case(deck.draw.choice(choices), group, f"everywhere {collective}"))
    return cases


def perform(
    client: ronde.Client, cases: list[Case], sets: list[ronde.ProcessSet], order: random.Random
) -> dict[int, Any]:
    """Submits this rank's cases in a rank-specific order. Returns their results."""
    mine = [case for case in cases if client.rank in case.members]
    mine = [case for case in mine if case.what.collective != "message" or client.rank in (case.root, case.to)]
    order.shuffle(mine)
    handles = {case.number: submit(client, case, sets) for case in mine}
    order.shuffle(mine)
    return {case.number: handles[case.number].wait() for case in mine}


def check_join(client: ronde.Client, deck: Deck, sets: list[ronde.ProcessSet], only: str, findings: Findings) -> None:
    """Ranks join one after the other, and the others continue with zeros for them."""
    levels = deck.draw.sample(range(client.size), client.size)  # a rank's level is how long it stays
    cases = [(deck.case(what), deck.draw.randrange(client.size)) for what in joined_combinations()]
    cases = [(case, level) for case, level in cases if only in f"joined {case.what}"]
    mine = [(case, level) for case, level in cases if client.rank in case.members and levels[client.rank] >= level]
    handles = [submit(client, case, sets) for case, _ in mine]
    for (case, level), handle in zip(mine, handles):
        absent = frozenset(rank for rank in case.members if levels[rank] < level)
        want = None if case.what.collective == "barrier" else expected(case, client.rank, absent)
        joined = dataclasses.replace(case.what, collective=f"joined {case.what.collective}")
        findings.note(dataclasses.replace(case, what=joined, name=f"joined {case.name}"), handle.wait(), want)
    joining = client.join_async()
    # Nobody joins other sets: they do what would be refused to all ranks.
    elsewhere = [deck.case(Combination("allgather", "int8"), group) for group in range(1, len(sets))]
    for number, result in perform(client, elsewhere, sets, random.Random(client.rank)).items():
        [case] = [case for case in elsewhere if case.number == number]
        findings.note(case, result, expected(case, client.rank))
    last = joining.wait()
    received = client.allgather(numpy.array([last]))
    assert 0 <= last < client.size, last
    assert (received == last).all(), received


def main() -> None:
    """Everything, on one session."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--order", default="first")
    parser.add_argument("--only", default="", help="what the combinations to perform contain, such as reduce/int8")
    parser.add_argument("--inline", action="store_true", help="tensors go inside messages")
    given = parser.parse_args()
    findings = Findings()
    with ronde.connect(inline=given.inline) as client:
        findings.rank = client.rank
        assert client.submission_path == ("grpc" if given.inline else "ring"), client.submission_path
        groups, sets = check_sets(client)
        cases = [case for case in draw_cases(given.seed, groups) if given.only in str(case.what)]
        first, second = (
            perform(client, cases, sets, random.Random(f"{given.order} {turn} {client.rank}")) for turn in range(2)
        )
        for case in cases:
            if case.number in first:
                again = digest_of(second[case.number])
                assert digest_of(first[case.number]) == again, f"another result in another order: {case}"
                findings.note(case, first[case.number], expected(case, client.rank))
        check_join(client, Deck(given.seed + 1, client.size, groups), sets, given.only, findings)
        removed = [client.remove_process_set(each) for each in sets]
        assert removed == [False, *[True] * (len(sets) - 1)], removed
        client.barrier("end")
        report = {"covered": findings.covered, "worst": findings.worst, "digests": findings.digests}
        (given.folder / f"rank-{client.rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
