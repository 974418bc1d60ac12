"""Run by every rank: errors of `ronde.torch`, after each of which the next operation works."""

from __future__ import annotations

import sys
from typing import Any, Callable

import torch

import ronde.torch as hvd


def raises(
    kind: type[BaseException], texts: str | tuple[str, ...], call: Callable[..., Any], *given: Any, **options: Any
) -> None:
    """The call raises that, with these in its text; afterwards all ranks reduce as ever."""
    wanted = (texts,) if isinstance(texts, str) else texts
    try:
        call(*given, **options)
    except kind as error:
        for text in wanted:
            assert text in str(error), error
    else:
        raise AssertionError(f"nothing was raised where {kind.__name__} with {wanted} was expected")
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


def odd(when_odd: Any, otherwise: Any) -> Any:
    """Something else on odd ranks."""
    return when_odd if hvd.rank() % 2 else otherwise


def check_mismatches() -> None:
    """All ranks that disagree get an error with the request of each."""
    broken = hvd.HorovodInternalError
    shapes = odd(torch.ones(2, 3), torch.ones(3, 2))
    dims = odd(torch.ones(2, 3), torch.ones(6))
    types = odd(torch.ones(4), torch.ones(4, dtype=torch.int32))
    for call in (hvd.allreduce, hvd.allreduce_, hvd.reducescatter):
        raises(broken, ("tensor shapes", "[2, 3]", "[3, 2]"), call, shapes)
        raises(broken, "data types", call, types)
        raises(broken, "reduction operation", call, torch.ones(4), op=odd(hvd.Sum, hvd.Average))
        raises(broken, "prescale", call, torch.ones(4), prescale_factor=odd(1.0, 2.0))
        raises(broken, "postscale", call, torch.ones(4), postscale_factor=odd(1.0, 2.0))
    raises(broken, "tensor shapes", hvd.grouped_allreduce, [torch.ones(2), shapes])
    raises(broken, "data types", hvd.grouped_allreduce, [torch.ones(4), types])
    for call in (hvd.allgather, hvd.alltoall):
        raises(broken, "One rank sent a tensor of rank", call, odd(torch.ones(4, 2), torch.ones(4)))
        raises(broken, "dimension", call, odd(torch.ones(4, 2), torch.ones(4, 3)))
        raises(broken, "data types", call, types)
    raises(broken, "tensor shapes", hvd.broadcast, shapes, 0)
    raises(broken, "tensor shapes", hvd.broadcast_, dims, 0)
    raises(broken, "data types", hvd.broadcast, types, 0)
    raises(broken, "root ranks", hvd.broadcast, torch.ones(2), odd(0, 1))
    raises(RuntimeError, "tensor shapes", hvd.synchronize, hvd.allreduce_async(shapes, name="later"))


def check_arguments() -> None:
    """Invalid arguments raise on this rank, before anything is submitted."""
    size = hvd.size()
    raises(ValueError, "is not supported", hvd.allreduce, torch.ones(2, dtype=torch.complex64))
    raises(ValueError, "is not supported", hvd.allgather, torch.ones(2, dtype=torch.complex64))
    raises(ValueError, "is not supported", hvd.allreduce, [1.0, 2.0])
    raises(ValueError, "op parameter supersedes average", hvd.allreduce, torch.ones(2), average=True, op=hvd.Sum)
    for root in (-1, size):
        raises(ValueError, "invalid root rank", hvd.broadcast, torch.ones(2), root)
        raises(ValueError, "invalid root rank", hvd.broadcast_async_, torch.ones(2), root)
    raises(ValueError, "scalar", hvd.reducescatter, torch.tensor(1.0))
    raises(hvd.HorovodInternalError, "adasum is not supported", hvd.reducescatter, torch.ones(size), op=hvd.Adasum)
    exchange = torch.ones(size, 2)
    raises(ValueError, "1-D", hvd.alltoall, exchange, splits=torch.ones(size, 1, dtype=torch.int32))
    raises(ValueError, "32-bit", hvd.alltoall, exchange, splits=torch.ones(size, dtype=torch.int64))
    raises(ValueError, "32-bit", hvd.alltoall, exchange, splits=torch.ones(size))
    raises(ValueError, "entries", hvd.alltoall, exchange, splits=torch.ones(size + 1, dtype=torch.int32))
    raises(ValueError, "larger than", hvd.alltoall, exchange, splits=torch.full((size,), 2, dtype=torch.int32))
    raises(ValueError, "0 or more", hvd.alltoall, exchange, splits=torch.full((size,), -1, dtype=torch.int32))
    raises(ValueError, "", hvd.alltoall, torch.ones(size + 1, 2))
    raises(hvd.HorovodInternalError, "rank-zero tensor", hvd.allgather, torch.tensor(1.0))
    raises(ValueError, "no handle", hvd.poll, 10**9)
    assert hvd.synchronize(10**9) is None
    raises(ValueError, "layout", hvd.allreduce, torch.ones(2).to_sparse())
    raises(ValueError, "sparse_coo", hvd.sparse_allreduce_async, torch.ones(2), "s", hvd.Sum)
    raises(ValueError, "op=Average and op=Sum", hvd.sparse_allreduce_async, torch.ones(2).to_sparse(), "s", hvd.Max)
    raises(ValueError, "MPI", hvd.mpi_threads_supported)
    assert (hvd.mpi_built(), hvd.gloo_built(), hvd.nccl_built()) == (False, True, 0)
    assert hvd.gloo_enabled()
    assert not hvd.mpi_enabled()
    raises(ValueError, f"in a process that is rank {hvd.rank()} already", hvd.init, rank=size)
    hvd.init(rank=hvd.rank())


def check_exceptions() -> None:
    """They are made as Horovod's are."""
    assert str(hvd.HorovodInternalError()) == ""
    assert str(hvd.HorovodInternalError("why")) == "why"
    assert issubclass(hvd.HorovodInternalError, RuntimeError)
    for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        raises(ValueError, "is not supported", call, [1.0])
    raises(ValueError, "is not supported", hvd.grouped_allreduce, [[1.0]])


def check_names_twice() -> None:
    """A name that is in flight on this rank is rejected, even if no other rank has submitted it yet."""
    rank = hvd.rank()
    begins: list[Callable[[], int]] = [
        lambda: hvd.allreduce_async(torch.ones(2), name="twice"),
        lambda: hvd.allgather_async(torch.ones(2), name="twice"),
        lambda: hvd.broadcast_async(torch.ones(2), 0, name="twice"),
        lambda: hvd.alltoall_async(torch.ones(hvd.size()), name="twice"),
        lambda: hvd.reducescatter_async(torch.ones(2), name="twice"),
        lambda: hvd.grouped_allreduce_async([torch.ones(2)], name="twice"),
    ]
    for begin in begins:
        if rank == 0:
            handle = begin()
            try:
                begin()
            except ValueError as error:
                assert "same name" in str(error), error
            else:
                raise AssertionError("the same name was taken twice")
        hvd.barrier()
        if rank:
            handle = begin()
        hvd.synchronize(handle)
        hvd.synchronize(begin())


def check_parameters() -> None:
    """Wrong models, optimizers and names."""
    weight = torch.nn.Parameter(torch.zeros(2))
    make = lambda: torch.optim.SGD([weight], lr=1.0)  # noqa: E731

    def wrap(**options: Any) -> Any:
        return hvd.DistributedOptimizer(make(), **options)

    raises(ValueError, "sequence of tuples", wrap, named_parameters=[weight])
    raises(ValueError, "must be unique. Found duplicates: w", wrap, named_parameters=[("w", weight), ("w", weight)])
    raises(ValueError, "were not named", wrap, named_parameters=[("v", torch.nn.Parameter(torch.zeros(2)))])
    raises(ValueError, "backward_passes_per_step must be > 0", wrap, backward_passes_per_step=0)
    raises(ValueError, "op != Average", wrap, gradient_predivide_factor=2.0, op=hvd.Sum)
    for groups in (-1, 1.5, True, "all", [weight], [[1]]):
        raises(ValueError, "groups", wrap, groups=groups)
    raises(ValueError, "only appear once in groups", wrap, groups=[[weight], [weight]])
    raises(ValueError, "does not exist", wrap, process_set=hvd.ProcessSet([hvd.rank()]))
    for wrong in (iter([weight]), (weight,), {"w": 1}, weight):
        raises(ValueError, "invalid params", hvd.broadcast_parameters, wrong, 0)
    lbfgs = torch.optim.LBFGS([weight])
    raises(ValueError, "LBFGS", hvd.broadcast_optimizer_state, lbfgs, 0)


def check_join() -> None:
    """While a rank has joined, operations that need it fail."""
    if hvd.rank() == 0:
        for call in (
            lambda: hvd.allgather(torch.ones(2), name="without"),
            lambda: hvd.broadcast(torch.ones(2), 0, name="without"),
            lambda: hvd.alltoall(torch.ones(hvd.size()), name="without"),
            lambda: hvd.reducescatter(torch.ones(2), name="without"),
        ):
            try:
                call()
            except hvd.HorovodInternalError as error:
                assert "Join" in str(error), error
            else:
                raise AssertionError("a collective went on without a rank")
    assert hvd.join() == 0


def check_end() -> None:
    """Errors before `init` and after `shutdown`; errors of waiting ranks name a rank that shuts down early."""
    hvd.barrier()
    if hvd.rank() == 0:
        hvd.shutdown()
    else:
        try:
            hvd.synchronize(hvd.allreduce_async(torch.ones(2), name="left alone"))
        except hvd.HorovodInternalError as error:
            assert "has been shut down" in str(error), error
        else:
            raise AssertionError("a rank that has left took part")
        hvd.shutdown()
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.barrier, lambda: hvd.allreduce(torch.ones(1))):
        try:
            call()
        except ValueError as error:
            assert "has not been initialized; use hvd.init()" in str(error), error
        else:
            raise AssertionError("there was a rank without a session")
    hvd.shutdown()
    assert not hvd.is_initialized()


def main() -> None:
    """Everything; the end last."""
    torch.set_num_threads(1)
    hvd.init()
    rank = hvd.rank()
    for check in (
        check_exceptions,
        check_arguments,
        check_mismatches,
        check_names_twice,
        check_parameters,
        check_join,
        check_end,
    ):
        check()
    hvd.init()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    print(f"rank {rank}: errors reach every rank")
    hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
