"""Run by every rank: process sets of `ronde.torch` in their forms, and sessions of some ranks."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

import ronde.torch as hvd


def raises(kind: type[BaseException], text: str, call: Any, *arguments: Any, **options: Any) -> None:
    """The call raises that, with that in its text."""
    try:
        call(*arguments, **options)
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"nothing was raised where {kind.__name__} with {text!r} was expected")


def leave() -> None:
    """Ends the session when all ranks of this world are done: the first to leave ends it for all."""
    hvd.barrier()
    hvd.shutdown()


def halves(size: int) -> tuple[list[int], list[int]]:
    """Even and odd ranks."""
    return list(range(0, size, 2)), list(range(1, size, 2))


def check_operations(even: hvd.ProcessSet, odd: hvd.ProcessSet) -> None:
    """Every collective on the set that this rank is in, under names that both use."""
    rank = hvd.rank()
    own, other = (even, odd) if rank in (even.ranks or []) else (odd, even)
    ranks = own.ranks or []
    assert own.included()
    assert not other.included()
    assert own.size() == len(ranks)
    assert own.rank() == ranks.index(rank)
    raises(ValueError, "not part of provided process set", other.rank)
    raises(ValueError, "is not a member of the provided process set", hvd.allreduce, torch.ones(2), process_set=other)
    x = torch.full((len(ranks), 2), float(rank))
    total = torch.full((len(ranks), 2), float(sum(ranks)))
    assert hvd.allreduce(x, op=hvd.Sum, name="a", process_set=own).equal(total)
    assert hvd.allreduce_(x.clone(), op=hvd.Sum, name="a", process_set=own).equal(total)
    torch.testing.assert_close(hvd.allreduce(x, process_set=own), total / len(ranks))
    assert all(each.equal(total) for each in hvd.grouped_allreduce([x, x], op=hvd.Sum, process_set=own))
    assert hvd.allgather(x[:1], name="g", process_set=own).equal(torch.tensor([[float(r)] * 2 for r in ranks]))
    assert hvd.grouped_allgather([x[:1]], process_set=own)[0].shape == (len(ranks), 2)
    assert hvd.broadcast(x, ranks[-1], process_set=own).equal(torch.full_like(x, float(ranks[-1])))
    raises(ValueError, "invalid root rank", hvd.broadcast, x, (other.ranks or [])[0], process_set=own)
    assert hvd.alltoall(x, process_set=own)[:, 0].tolist() == [float(r) for r in ranks]
    ones = torch.ones(len(ranks), dtype=torch.int32)
    assert hvd.alltoall(x, splits=ones, process_set=own)[1].equal(ones)
    assert hvd.reducescatter(x, op=hvd.Sum, process_set=own).equal(total[:1])
    assert hvd.grouped_reducescatter([x], op=hvd.Sum, process_set=own)[0].equal(total[:1])
    assert hvd.broadcast_object(rank, ranks[0], process_set=own) == ranks[0]
    assert hvd.allgather_object(rank, process_set=own) == ranks
    check_adasum(own)
    hvd.barrier(process_set=own)
    x.requires_grad_()
    hvd.allreduce(x, op=hvd.Sum, process_set=own).sum().backward()
    assert x.grad is not None
    assert x.grad.equal(torch.full_like(x, float(len(ranks))))


def vector(rank: int, count: int = 70_000) -> torch.Tensor:
    """A rank's vector."""
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def adasum_of(vectors: list[torch.Tensor]) -> torch.Tensor:
    """Computes Adasum in one process, as Horovod describes it: ranks beyond a power of two combine first, in pairs."""

    def both(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        dot = (a * b).sum()
        return (1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b

    excess = len(vectors) - (1 << (len(vectors).bit_length() - 1))
    paired = [both(*vectors[2 * index : 2 * index + 2]) for index in range(excess)]
    left = paired + vectors[2 * excess :]
    while len(left) > 1:
        left = [both(*left[index : index + 2]) for index in range(0, len(left), 2)]
    return left[0]


def check_adasum(own: hvd.ProcessSet) -> None:
    """Adasum of a set's ranks equals that of one process, also in the optimizer."""
    ranks, rank = own.ranks or [], hvd.rank()
    for count in (3, 70_000):
        mine, want = vector(rank, count), adasum_of([vector(each, count) for each in ranks])
        torch.testing.assert_close(hvd.allreduce(mine, op=hvd.Adasum, name=f"s.{count}", process_set=own), want)
        torch.testing.assert_close(hvd.allreduce(mine, op=hvd.Adasum, process_set=own), want)
        pair = hvd.grouped_allreduce([mine, 2 * mine], op=hvd.Adasum, process_set=own)
        torch.testing.assert_close(pair, [want, 2 * want])
        torch.testing.assert_close(hvd.allreduce_(mine.clone(), op=hvd.Adasum, process_set=own), want)
    weights = [torch.nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(weights, lr=0.5), named_parameters=zip("ab", weights), op=hvd.Adasum, process_set=own
    )
    assert optimizer.process_set is own
    want = [weight.detach().clone() for weight in weights]
    for step in range(3):
        optimizer.zero_grad()
        sum((weight * vector(2 * rank + step + at, 3)).sum() for at, weight in enumerate(weights)).backward()
        optimizer.step()
        want = [
            weight + adasum_of([-0.5 * vector(2 * each + step + at, 3) for each in ranks])
            for at, weight in enumerate(want)
        ]
        torch.testing.assert_close([weight.detach() for weight in weights], want)


def check_optimizers_of_others(own: hvd.ProcessSet, other: hvd.ProcessSet) -> None:
    """An optimizer of a set that this rank is not in makes local steps, also with Adasum."""
    for op in (hvd.Average, hvd.Adasum):
        weight = torch.nn.Parameter(torch.zeros(3))
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([weight], lr=1.0), named_parameters=[("w", weight)], op=op, process_set=other
        )
        (weight * float(1 + hvd.rank())).sum().backward()
        optimizer.step()
        assert weight.detach().equal(torch.full((3,), -1.0 - hvd.rank()))
    hvd.barrier(process_set=own)


def check_joins(own: hvd.ProcessSet) -> None:
    """Ranks of a set run out of data at different times, while all ranks go on together."""
    ranks, weight = own.ranks or [], torch.nn.Parameter(torch.zeros(3))
    made = {"named_parameters": [("w", weight)], "process_set": own}
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), **made)
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    everybodys = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), named_parameters=zip("xy", weights))
    want = torch.zeros(3)
    for _ in range(2):
        # All ranks check in some of these steps that no rank has a gradient of the second parameter.
        everybodys.zero_grad()
        weights[0].sum().backward()
        everybodys.step()
        steps = {rank: 3 + 4 * position for position, rank in enumerate(ranks)}
        for step in range(steps[hvd.rank()]):
            optimizer.zero_grad()
            (weight * float(1 + hvd.rank())).sum().backward()
            optimizer.step()
            active = [rank for rank in ranks if steps[rank] > step]
            want = want - sum(1.0 + rank for rank in active) / len(ranks)
        torch.testing.assert_close(weight.detach(), want)
        assert hvd.join(process_set=own) == ranks[-1]
        hvd.broadcast_(weight.data, ranks[-1], process_set=own)
        want = weight.detach().clone()
        everybodys.zero_grad()
        weights[0].sum().backward()
        everybodys.step()
    torch.testing.assert_close(weights[0].detach(), torch.full((2,), -4.0))


def check_static() -> None:
    """Sets that `init` gets."""
    hvd.init()
    even, odd = (hvd.ProcessSet(ranks) for ranks in halves(hvd.size()))
    assert even.size() is None
    assert even.rank() is None
    size = hvd.size()
    leave()
    hvd.init(process_sets=[even, odd])
    assert str(hvd.global_process_set) == f"ProcessSet(process_set_id=0, ranks={list(range(size))}, mpi_comm=None)"
    assert str(even) == f"ProcessSet(process_set_id=1, ranks={halves(size)[0]}, mpi_comm=None)"
    assert odd.process_set_id == 2
    check_operations(even, odd)
    own, other = (even, odd) if even.included() else (odd, even)
    check_optimizers_of_others(own, other)
    check_joins(own)
    raises(ValueError, "is not a member of the provided process set", hvd.join, process_set=other)
    raises(ValueError, "does not exist", hvd.join, process_set=hvd.ProcessSet([0]))
    raises(ValueError, "Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow adding", hvd.add_process_set, [0])
    raises(ValueError, "HOROVOD_DYNAMIC_PROCESS_SETS=1", hvd.remove_process_set, even)
    unknown = hvd.ProcessSet([0])
    raises(ValueError, "does not exist, or has not been registered", hvd.allreduce, torch.ones(1), process_set=unknown)
    leave()
    assert even.process_set_id is None
    hvd.init(process_sets=[even, odd])
    check_operations(even, odd)
    leave()
    # The session stays, so that it can be left in order.
    raises(ValueError, "entry number 1 is a duplicate", hvd.init, process_sets=[odd, hvd.ProcessSet(range(size))])
    assert hvd.is_initialized()
    leave()


def check_dynamic() -> None:
    """Sets that come and go."""
    hvd.init(process_sets="dynamic")
    size = hvd.size()
    even, odd = (hvd.add_process_set(ranks) for ranks in halves(size))
    check_operations(even, odd)
    raises(ValueError, "duplicate process set", hvd.add_process_set, halves(size)[1])
    raises(ValueError, "duplicate process set", hvd.add_process_set, range(size))
    raises(ValueError, "duplicate process set", hvd.add_process_set, even)
    raises(ValueError, "not among the", hvd.add_process_set, [size])
    raises(ValueError, "duplicate process set", hvd.add_process_set, [0, 0])
    raises(ValueError, "ranks, as integers", hvd.ProcessSet, ["a"])
    raises(ValueError, "ranks, as integers", hvd.ProcessSet, 3)
    freed = even.process_set_id
    assert hvd.remove_process_set(even)
    assert even.process_set_id is None
    assert not hvd.remove_process_set(even)
    assert not hvd.remove_process_set(hvd.global_process_set)
    raises(ValueError, "does not exist", hvd.allreduce, torch.ones(1), process_set=even)
    again = hvd.add_process_set(hvd.ProcessSet(halves(size)[0]))
    assert again.process_set_id == freed
    check_operations(again, odd)
    # Ranks that request different sets get an error.
    raises(ValueError, "", hvd.add_process_set, [0] if hvd.rank() == 0 else [1])
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    leave()


def check_dynamic_by_variable() -> None:
    """HOROVOD_DYNAMIC_PROCESS_SETS=1 is as `init(process_sets="dynamic")`."""
    hvd.init()
    even, odd = (hvd.add_process_set(ranks) for ranks in halves(hvd.size()))
    check_operations(even, odd)
    assert hvd.remove_process_set(even)
    print(f"rank {hvd.rank()} of {hvd.size()}: sets are added and removed")
    leave()


def check_join_among(own: list[int], job_rank: int) -> None:
    """Joins in a session of some ranks: they do not wait for those of the other sessions, which run at another pace."""
    position = own.index(job_rank)
    for turn in range(2 + 3 * (own[0] % 2)):
        for step in range(position + 1):
            active = [rank for number, rank in enumerate(own) if number >= step]
            found = hvd.allreduce(torch.tensor([float(job_rank), 1.0]), op=hvd.Sum)
            assert found.tolist() == [float(sum(active)), float(len(active))], (turn, step)
            mean = hvd.allreduce(torch.ones(70_000))
            torch.testing.assert_close(mean, torch.full((70_000,), len(active) / len(own)))
        # The number of the last rank is that among the ranks of the session.
        assert hvd.join() == len(own) - 1
        assert hvd.allgather(torch.tensor([job_rank])).tolist() == own


def check_sessions_of_some() -> None:
    """Two worlds in one job; then one rank by itself."""
    hvd.init()
    job_rank, size = hvd.rank(), hvd.size()
    leave()
    even, odd = halves(size)
    own = even if job_rank in even else odd
    hvd.init(comm=own)
    assert (hvd.rank(), hvd.size()) == (own.index(job_rank), len(own))
    assert (hvd.local_size(), hvd.cross_size()) == (len(own), 1)
    assert hvd.allreduce(torch.tensor([float(job_rank)]), op=hvd.Sum).item() == sum(own)
    assert hvd.broadcast(torch.tensor([job_rank]), root_rank=len(own) - 1).item() == own[-1]
    assert hvd.global_process_set.ranks == list(range(len(own)))
    check_join_among(own, job_rank)
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), named_parameters=[("w", weight)])
    (weight * float(job_rank)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), torch.full((3,), -sum(own) / len(own)))
    leave()
    hvd.init(comm=[job_rank])
    assert (hvd.rank(), hvd.size()) == (0, 1)
    assert hvd.allreduce(torch.ones(2)).tolist() == [1.0, 1.0]
    leave()
    raises(ValueError, "Invalid type of argument comm", hvd.init, comm="everybody")
    raises(ValueError, "give ranks of the job", hvd.init, comm=[size])
    raises(ValueError, "is not", hvd.init, comm=[r for r in range(size) if r != job_rank])
    assert not hvd.is_initialized()


def main() -> None:
    """Everything, one session after the other; with Horovod's variable, what it permits."""
    torch.set_num_threads(1)
    if os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS"):
        check_dynamic_by_variable()
        return
    check_static()
    check_dynamic()
    check_sessions_of_some()
    hvd.init()
    print(f"rank {hvd.rank()} of {hvd.size()}: process sets hold")
    leave()


if __name__ == "__main__":
    sys.exit(main())
