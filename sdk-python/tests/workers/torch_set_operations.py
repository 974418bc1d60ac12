"""Run by every rank: each operation of `ronde.torch` that takes a process set, on sets of every kind."""

from __future__ import annotations

import sys
from typing import Any, Callable

import torch
from torch import nn

import ronde.torch as hvd

equal = torch.testing.assert_close


class RankInSet:
    """This rank within a set: its inputs and the expected results."""

    def __init__(self, members: hvd.ProcessSet, tag: str) -> None:
        self.ranks = list(members.ranks or [])
        self.options: dict[str, Any] = {"process_set": members}
        self.count, self.own = len(self.ranks), self.ranks.index(hvd.rank())
        self.tag = tag
        self.x = torch.full((2 * self.count, 3), float(hvd.rank()))
        self.total = torch.full_like(self.x, float(sum(self.ranks)))
        self.uneven = torch.arange(2.0 * self.count + 1).reshape(-1, 1)
        self.factors = float(sum(rank + 1 for rank in self.ranks))

    def sizes(self) -> list[int]:
        """How the rows of `uneven` are divided."""
        rows = len(self.uneven)
        return [rows // self.count + (index < rows % self.count) for index in range(self.count)]

    def rows(self) -> torch.Tensor:
        """As many as this rank's place, and one."""
        return torch.full((self.own + 1, 2), float(hvd.rank()))

    def all_rows(self) -> torch.Tensor:
        return torch.cat([torch.full((index + 1, 2), float(rank)) for index, rank in enumerate(self.ranks)])


def reductions(member: RankInSet) -> None:
    x, total, tag, of = member.x, member.total, member.tag, member.options
    equal(hvd.allreduce(x, op=hvd.Sum, name=f"{tag}.a", **of), total)
    equal(hvd.allreduce(x, **of), total / member.count)
    equal(hvd.allreduce(x, op=hvd.Min, **of), torch.full_like(x, float(min(member.ranks))))
    equal(hvd.allreduce(x, op=hvd.Max, **of), torch.full_like(x, float(max(member.ranks))))
    equal(hvd.allreduce(torch.full((2,), 2.0), op=hvd.Product, **of), torch.full((2,), 2.0**member.count))
    equal(hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5, **of), total)
    equal(hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16, **of), total)
    equal(hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum, name=f"{tag}.b", **of)), total)
    for write in (hvd.allreduce_, lambda *a, **k: hvd.synchronize(hvd.allreduce_async_(*a, **k))):
        written = x.clone()
        write(written, op=hvd.Sum, **of)
        equal(written, total)
    for group in (
        hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum, name=f"{tag}.c", **of),
        hvd.grouped_allreduce_([x.clone(), 2 * x], op=hvd.Sum, **of),
        hvd.synchronize(hvd.grouped_allreduce_async([x, 2 * x], op=hvd.Sum, **of)),
        hvd.synchronize(hvd.grouped_allreduce_async_([x.clone(), 2 * x], op=hvd.Sum, **of)),
    ):
        equal(group[0], total)
        equal(group[1], 2 * total)


def gathers(member: RankInSet) -> None:
    rows, everybodys, of = member.rows(), member.all_rows(), member.options
    equal(hvd.allgather(rows, name=f"{member.tag}.g", **of), everybodys)
    equal(hvd.synchronize(hvd.allgather_async(rows, **of)), everybodys)
    for group in (
        hvd.grouped_allgather([rows, rows.double()], name=f"{member.tag}.h", **of),
        hvd.synchronize(hvd.grouped_allgather_async([rows, rows.double()], **of)),
    ):
        equal(group[0], everybodys)
        equal(group[1], everybodys.double())
    assert hvd.allgather_object(hvd.rank(), **of) == member.ranks


def broadcasts(member: RankInSet) -> None:
    x, of = member.x, member.options
    for root in member.ranks:
        roots = torch.full_like(x, float(root))
        equal(hvd.broadcast(x, root, name=f"{member.tag}.r{root}", **of), roots)
        equal(hvd.synchronize(hvd.broadcast_async(x, root, **of)), roots)
        for write in (hvd.broadcast_, lambda *a, **k: hvd.synchronize(hvd.broadcast_async_(*a, **k))):
            written = x.clone()
            write(written, root, **of)
            equal(written, roots)
        assert hvd.broadcast_object({"rank": hvd.rank()}, root, **of) == {"rank": root}
    hvd.barrier(**of)


def exchanges(member: RankInSet) -> None:
    x, of, own = member.x, member.options, member.own
    equal(hvd.alltoall(x, name=f"{member.tag}.e", **of)[::2, 0], torch.tensor(member.ranks, dtype=torch.float32))
    splits = torch.tensor([own + index for index in range(member.count)], dtype=torch.int32)
    given = torch.full((int(splits.sum()), 1), float(hvd.rank()))
    taken = torch.cat([torch.full((index + own, 1), float(rank)) for index, rank in enumerate(member.ranks)])
    for received, counts in (
        hvd.alltoall(given, splits, **of),
        hvd.synchronize(hvd.alltoall_async(given, splits, **of)),
    ):
        equal(received, taken)
        assert counts.dtype == torch.int32
        assert counts.tolist() == [index + own for index in range(member.count)]


def scatters(member: RankInSet) -> None:
    given, of, sizes = member.uneven * (hvd.rank() + 1), member.options, member.sizes()
    start = sum(sizes[: member.own])
    part = (member.uneven * member.factors)[start : start + sizes[member.own]]
    equal(hvd.reducescatter(given, op=hvd.Sum, name=f"{member.tag}.s", **of), part)
    equal(hvd.reducescatter(given, **of), part / member.count)
    equal(hvd.synchronize(hvd.reducescatter_async(given, op=hvd.Sum, **of)), part)
    for group in (
        hvd.grouped_reducescatter([given, 2 * given], op=hvd.Sum, name=f"{member.tag}.t", **of),
        hvd.synchronize(hvd.grouped_reducescatter_async([given, 2 * given], op=hvd.Sum, **of)),
    ):
        equal(group[0], part)
        equal(group[1], 2 * part)


def sparse(member: RankInSet) -> None:
    given = torch.sparse_coo_tensor([[member.own]], [[hvd.rank() + 1.0] * 2], (member.count, 2), check_invariants=True)
    everybodys = torch.tensor([[rank + 1.0] * 2 for rank in member.ranks])
    for op, expected in ((hvd.Sum, everybodys), (hvd.Average, everybodys / member.count)):
        equal(hvd.sparse_allreduce_async(given, f"{member.tag}.z", op, **member.options)().to_dense(), expected)


def gradient(of: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The gradient of the result's sum, in which each rank's counts with the rank's number and one."""
    x = x.clone().requires_grad_()
    (of(x) * (hvd.rank() + 1)).sum().backward()
    assert x.grad is not None
    return x.grad


def gradients(member: RankInSet) -> None:
    x, of, count, ranks, factors = member.x, member.options, member.count, member.ranks, member.factors
    ones = torch.ones_like(x)
    equal(gradient(lambda v: hvd.allreduce(v, op=hvd.Sum, **of), x), ones * factors)
    equal(gradient(lambda v: hvd.allreduce(v, **of), x), ones * factors / count)
    equal(gradient(lambda v: hvd.grouped_allreduce([v], op=hvd.Sum, **of)[0], x), ones * factors)
    rows = member.rows()
    equal(gradient(lambda v: hvd.allgather(v, **of), rows), torch.ones_like(rows) * factors / count)
    equal(gradient(lambda v: hvd.grouped_allgather([v], **of)[0], rows), torch.ones_like(rows) * factors / count)
    roots = ones * (factors / count if member.own == 0 else 0.0)
    equal(gradient(lambda v: hvd.broadcast(v, ranks[0], **of), x), roots)
    splits = torch.tensor([member.own + index for index in range(count)], dtype=torch.int32)
    given = torch.ones(int(splits.sum()))
    back = torch.cat([torch.full((member.own + index,), rank + 1.0) for index, rank in enumerate(ranks)])
    equal(gradient(lambda v: hvd.alltoall(v, splits, **of)[0], given), back)
    parts = torch.cat([torch.full((size, 1), rank + 1.0) for size, rank in zip(member.sizes(), ranks)])
    equal(gradient(lambda v: hvd.reducescatter(v, op=hvd.Sum, **of), member.uneven), parts * count)
    equal(gradient(lambda v: hvd.reducescatter(v, **of), member.uneven), parts)
    equal(gradient(lambda v: hvd.grouped_reducescatter([v], **of)[0], member.uneven), parts)


def step(members: hvd.ProcessSet) -> list[float]:
    """What a step of an optimizer of the set makes of a weight of 0 whose gradient is the rank."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), named_parameters=[("w", weight)], process_set=members
    )
    (weight * float(hvd.rank())).sum().backward()
    optimizer.step()
    values: list[float] = weight.tolist()
    return values


def check_member(members: hvd.ProcessSet, tag: str) -> None:
    """Every operation, by its values."""
    member = RankInSet(members, tag)
    for operations in (reductions, gathers, broadcasts, exchanges, scatters, sparse, gradients):
        operations(member)
    assert step(members) == [-sum(member.ranks) / member.count] * 3


def check_outsider(members: hvd.ProcessSet) -> None:
    """Every operation, refused before anything was sent; an optimizer of others' set steps by itself."""
    ranks = members.ranks or []
    rows, root = torch.ones(len(ranks), 2), ranks[0]
    of: dict[str, Any] = {"process_set": members}
    one = torch.sparse_coo_tensor([[0]], [1.0], (2,), check_invariants=True)
    splits = torch.ones(len(ranks), dtype=torch.int32)
    single = [hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_, hvd.allgather]
    single += [hvd.allgather_async, hvd.alltoall, hvd.alltoall_async, hvd.reducescatter, hvd.reducescatter_async]
    grouped = [hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allreduce_async]
    grouped += [hvd.grouped_allreduce_async_, hvd.grouped_allgather, hvd.grouped_allgather_async]
    grouped += [hvd.grouped_reducescatter, hvd.grouped_reducescatter_async]
    rooted = [hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_async_, hvd.broadcast_object]
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [(call, (rows,)) for call in single]
    calls += [(call, ([rows],)) for call in grouped]
    calls += [(call, (rows, root)) for call in rooted]
    calls += [(hvd.alltoall, (rows, splits)), (hvd.alltoall_async, (rows, splits)), (hvd.barrier, ())]
    calls += [(hvd.allgather_object, (1,)), (hvd.sparse_allreduce_async, (one, "s", hvd.Sum))]
    for call, arguments in calls:
        try:
            call(*arguments, **of)
        except ValueError as error:
            assert f"Rank {hvd.rank()} is not a member of the provided process set." in str(error), error
        else:
            raise AssertionError(f"{call.__name__} took a rank that is not in the set")
    assert step(members) == [-float(hvd.rank())] * 3


def check(members: hvd.ProcessSet, tag: str) -> None:
    """From both sides; no rank waits for another that is not in the set."""
    if members.included():
        check_member(members, tag)
    else:
        check_outsider(members)


def main() -> None:
    """Two sets at once, all, some while the others do something else, one rank; then one that was removed again."""
    torch.set_num_threads(1)
    hvd.init(process_sets="dynamic")
    size = hvd.size()
    even, odd = hvd.add_process_set(range(0, size, 2)), hvd.add_process_set(range(1, size, 2))
    own, other = (even, odd) if even.included() else (odd, even)
    # The same names on both.
    check(own, "half")
    check(other, "half")
    check(hvd.global_process_set, "all")
    ends = hvd.add_process_set([0, size - 1]) if size > 2 else own
    check(ends, "ends")
    last = hvd.add_process_set([size - 1]) if size > 2 else odd
    check(last, "last")
    check(hvd.global_process_set, "all")
    freed = even.process_set_id
    assert hvd.remove_process_set(even)
    try:
        hvd.allreduce(torch.ones(1), process_set=even)
    except ValueError as error:
        assert "Process set provided does not exist, or has not been registered." in str(error)
    else:
        raise AssertionError("a set that was removed was taken")
    assert hvd.add_process_set(even) is even
    assert even.process_set_id == freed
    check(even, "again")
    check(odd, "again")
    hvd.barrier()
    print(f"rank {hvd.rank()} of {size}: operations of sets hold", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
