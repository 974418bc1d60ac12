"""Run by every rank: the collectives of `ronde.torch` with their gradients, groups and process sets."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

import ronde.torch as hvd

POLL_TIMEOUT_S = 60
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def same(actual: Any, expected: Any) -> None:
    """Equal, with the type and shape."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def mine(shape: tuple[int, ...], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A rank's tensor, which each rank can make; small whole numbers."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 5, shape, generator=generator).to(dtype)


def everybodys(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """All ranks' tensors."""
    return [mine(shape, rank, dtype) for rank in range(hvd.size())]


def check_allreduce() -> None:
    """Every form, type and reduction."""
    rank, size = hvd.rank(), hvd.size()
    for dtype in (*FLOATS, *INTEGERS):
        for shape in ((), (17,), (17, 3), (2, 3, 4)):
            total = torch.stack([each.double() for each in everybodys(shape, dtype)]).sum(0)
            same(hvd.allreduce(mine(shape, rank, dtype), op=hvd.Sum), total.to(dtype))
            place = mine(shape, rank, dtype)
            assert hvd.allreduce_(place, op=hvd.Sum) is place
            same(place, total.to(dtype))
            average = total / size if dtype.is_floating_point else (total / size).trunc()
            result = hvd.synchronize(hvd.allreduce_async(mine(shape, rank, dtype), average=None, op=hvd.Average))
            torch.testing.assert_close(result, average.to(dtype), rtol=2e-2, atol=0)
    stacked = torch.stack(everybodys((5,)))
    same(hvd.allreduce(mine((5,), rank), op=hvd.Min), stacked.min(0).values)
    same(hvd.allreduce(mine((5,), rank), op=hvd.Max), stacked.max(0).values)
    same(hvd.allreduce(mine((5,), rank), op=hvd.Product), stacked.prod(0))
    scaled = hvd.allreduce(mine((5,), rank), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    same(scaled, stacked.sum(0) * 2)
    half = hvd.allreduce(mine((5,), rank), op=hvd.Sum, compression=hvd.Compression.fp16)
    same(half, stacked.sum(0))
    by_bits = hvd.allreduce(mine((5,), rank), op=hvd.Sum, compression=hvd.Compression.bf16)
    same(by_bits, stacked.sum(0))
    handles = [hvd.allreduce_async(mine((n,), rank), op=hvd.Sum, name=f"many.{n}") for n in range(1, 40)]
    assert all(isinstance(handle, int) for handle in handles)
    for n, handle in reversed(list(enumerate(handles, 1))):
        same(hvd.synchronize(handle), torch.stack(everybodys((n,))).sum(0))
        assert hvd.synchronize(handle) is None


def check_resizing() -> None:
    """A new result of 64 KiB or more is a view of shared memory, which cannot grow; copies and in-place results can."""
    size = hvd.size()
    small, large = torch.ones(4), torch.ones(20_000)
    for resizable in (hvd.allreduce(small), hvd.allreduce(large).clone(), hvd.allreduce_(large)):
        resizable.resize_(50_000)
        assert resizable.shape == (50_000,)
    result = hvd.allreduce(torch.ones(20_000), op=hvd.Sum)
    try:
        result.resize_(50_000)
    except RuntimeError as error:
        assert "not resizable" in str(error), error
    else:
        raise AssertionError("a view of shared memory was resized")
    same(result.resize_(10), torch.full((10,), float(size)))


def check_polled() -> None:
    """A result is written as soon as a poll returns true, and a failure is raised by the wait."""
    size = hvd.size()
    place = torch.ones(5)
    handle = hvd.allreduce_async_(place, op=hvd.Sum)
    deadline = time.monotonic() + POLL_TIMEOUT_S
    while not hvd.poll(handle):
        assert time.monotonic() < deadline, "an all-reduce of five elements does not end"
    same(place, torch.full((5,), float(size)))
    assert hvd.poll(handle)
    assert hvd.synchronize(handle) is place
    if size == 1:
        return
    handle = hvd.allreduce_async(torch.ones(2 + hvd.rank() % 2))
    while not hvd.poll(handle):
        assert time.monotonic() < deadline, "a mismatch is not reported"
    try:
        hvd.synchronize(handle)
    except hvd.HorovodInternalError as error:
        assert "tensor shapes" in str(error), error
    else:
        raise AssertionError("a failure was forgotten")


def check_scales() -> None:
    """Factors that no float has exactly: the bits are those of PyTorch's own product, in the type it is made in."""
    size, generator = hvd.size(), torch.Generator().manual_seed(7)
    factor = 0.2345678912345
    for dtype in (torch.int32, torch.int64, torch.float16, torch.float32, torch.float64):
        tensor = torch.randint(-100, 100, (size * 17, 17), generator=generator).to(dtype)
        wide = {torch.float16: torch.float32, torch.int32: torch.float64, torch.int64: torch.float64}.get(dtype, dtype)
        exact = torch.tensor(factor, dtype=torch.float64).to(wide)
        before = (tensor.to(wide) * exact).to(dtype) * size
        after = ((tensor * size).to(wide) * exact).to(dtype)
        rows = slice(hvd.rank() * 17, (hvd.rank() + 1) * 17)
        for expected, factors in ((before, {"prescale_factor": factor}), (after, {"postscale_factor": factor})):
            same(hvd.allreduce(tensor, op=hvd.Sum, **factors), expected)
            same(hvd.grouped_allreduce([tensor, tensor], op=hvd.Sum, **factors)[1], expected)
            same(hvd.reducescatter(tensor, op=hvd.Sum, **factors), expected[rows])
            same(hvd.grouped_reducescatter([tensor], op=hvd.Sum, **factors)[0], expected[rows])


def check_gradients() -> None:
    """Horovod's rules for gradients."""
    rank, size = hvd.rank(), hvd.size()
    weight = torch.arange(6.0).reshape(2, 3)

    def gradient_of(function: Any, tensor: torch.Tensor) -> torch.Tensor:
        tensor.requires_grad_()
        output = function(tensor)
        (output * torch.arange(float(output.numel())).reshape(output.shape)).sum().backward()
        assert tensor.grad is not None
        return tensor.grad

    def of(function: Any) -> torch.Tensor:
        return gradient_of(function, mine((2, 3), rank))

    same(of(lambda x: hvd.allreduce(x, op=hvd.Sum)), weight * size)
    same(of(lambda x: hvd.allreduce(x, op=hvd.Average)), weight)
    same(of(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0)), weight * size * 2)
    same(of(lambda x: torch.cat(hvd.grouped_allreduce([x, x + 1], op=hvd.Sum))[2:]), weight * size)
    # Rank 1 and all later ones contribute one row more than rank 0.
    rows = [2 + (each > 0) for each in range(size)]
    start = sum(rows[:rank])
    whole = torch.arange(3.0 * sum(rows)).reshape(-1, 3)
    given = mine((rows[rank], 3), rank)
    same(gradient_of(hvd.allgather, given), whole[start : start + rows[rank]])
    given = mine((rows[rank], 3), rank)
    same(gradient_of(lambda x: hvd.grouped_allgather([x, x])[1], given), whole[start : start + rows[rank]])
    expected = weight if rank == size - 1 else torch.zeros_like(weight)
    same(of(lambda x: hvd.broadcast(x, root_rank=size - 1)), expected)
    # Each rank sends row i to rank i; the row comes back with the gradient of its place there.
    given = mine((size, 2), rank)
    returned = gradient_of(hvd.alltoall, given)
    same(returned, torch.arange(2.0).repeat(size, 1) + 2.0 * rank)
    # One row stays unsent, and has no gradient.
    given = mine((size + 1, 2), rank)
    splits = torch.ones(size, dtype=torch.int32)
    returned = gradient_of(lambda x: hvd.alltoall(x, splits)[0], given)
    same(returned, torch.cat([torch.arange(2.0).repeat(size, 1) + 2.0 * rank, torch.zeros(1, 2)]))
    given = mine((size, 2), rank)
    returned = gradient_of(lambda x: hvd.reducescatter(x, op=hvd.Sum), given)
    same(returned, torch.arange(2.0).repeat(size, 1) * size)
    given = mine((size, 2), rank)
    returned = gradient_of(lambda x: hvd.grouped_reducescatter([x, x])[0], given)
    same(returned, torch.arange(2.0).repeat(size, 1))


def check_rows() -> None:
    """Gathers, exchanges and divisions of rows."""
    rank, size = hvd.rank(), hvd.size()
    for dtype in (*FLOATS, *INTEGERS, torch.bool):
        parts = [mine((each + 1, 2), each, dtype) for each in range(size)]
        same(hvd.allgather(parts[rank]), torch.cat(parts))
        same(hvd.broadcast(parts[rank][:1], size - 1), parts[-1][:1])
        square = [mine((size, 2), each, dtype) for each in range(size)]
        same(hvd.alltoall(square[rank]), torch.stack([each[rank] for each in square]))
    gathered = hvd.synchronize(hvd.grouped_allgather_async([torch.full((rank, 2), 1.0), torch.full((1,), float(rank))]))
    same(gathered[0], torch.ones(sum(range(size)), 2))
    same(gathered[1], torch.arange(float(size)))
    # Rank r sends r + 1 rows to each, rank 0 none to itself.
    splits = torch.full((size,), rank + 1, dtype=torch.int32)
    splits[0] = 0 if rank == 0 else splits[0]
    received, counts = hvd.alltoall(torch.full((int(splits.sum()), 3), float(rank)), splits=splits)
    expected = torch.tensor([0 if rank == each == 0 else each + 1 for each in range(size)], dtype=torch.int32)
    same(counts, expected)
    same(received, torch.repeat_interleave(torch.arange(float(size)), expected).reshape(-1, 1).expand(-1, 3))
    for rows in (0, 1, size, size + 1, 3 * size - 1):
        total = torch.stack(everybodys((rows, 2))).sum(0)
        each, more = divmod(rows, size)
        start = rank * each + min(rank, more)
        end = start + each + (rank < more)
        same(hvd.reducescatter(mine((rows, 2), rank), op=hvd.Sum), total[start:end])
        handle = hvd.grouped_reducescatter_async([mine((rows, 2), rank)] * 2, op=hvd.Sum, postscale_factor=2.0)
        same(hvd.synchronize(handle)[1], total[start:end] * 2)
    same(hvd.grouped_allreduce([]), [])


def check_groups() -> None:
    """Groups in place and elsewhere."""
    rank = hvd.rank()
    tensors = [mine((n, 3), rank) for n in range(1, 6)]
    totals = [torch.stack(everybodys((n, 3))).sum(0) for n in range(1, 6)]
    same(hvd.grouped_allreduce(tensors, op=hvd.Sum, name="elsewhere"), totals)
    same(hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum)), totals)
    same(hvd.grouped_allreduce(tensors, op=hvd.Sum, compression=hvd.Compression.fp16), totals)
    results = hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    assert all(result is tensor for result, tensor in zip(results, tensors))
    same(tensors, totals)


def check_sparse() -> None:
    """Indices that ranks share and that only one has."""
    rank, size = hvd.rank(), hvd.size()
    tensor = torch.sparse_coo_tensor([[0, rank + 1]], torch.ones(2, 4), (size + 2, 4), check_invariants=True)
    finish = hvd.sparse_allreduce_async(tensor, name="sparse", op=hvd.Average)
    expected = torch.zeros(size + 2, 4)
    expected[0] = 1.0
    expected[1 : size + 1] = 1.0 / size
    torch.testing.assert_close(finish().to_dense(), expected)


def check_objects() -> None:
    """Objects of any kind and size."""
    rank, size = hvd.rank(), hvd.size()
    received = hvd.broadcast_object({"rank": rank, "text": "x" * 10_000 * (rank + 1)}, root_rank=size - 1, name="thing")
    assert received["rank"] == size - 1
    assert len(received["text"]) == 10_000 * size
    assert hvd.broadcast_object(None if rank else [1, (2, 3)]) == [1, (2, 3)]
    everything = hvd.allgather_object({"rank": rank, "list": list(range(rank))})
    assert everything == [{"rank": each, "list": list(range(each))} for each in range(size)]


def check_adasum() -> None:
    """Vectors at right angles add up, parallel ones do not."""
    rank, size = hvd.rank(), hvd.size()
    apart = torch.zeros(size)
    apart[rank] = 1.0
    torch.testing.assert_close(hvd.allreduce(apart, op=hvd.Adasum), torch.ones(size))
    torch.testing.assert_close(hvd.allreduce(torch.ones(5), op=hvd.Adasum), torch.ones(5))


def check_profiler() -> None:
    """Operations have names in a profile."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        hvd.allreduce(torch.ones(3), name="profiled")
    names = {event.key for event in profile.key_averages()}
    assert "ronde::allreduce.profiled" in names, names
    assert "ronde::synchronize.allreduce" in names, names


def check_join() -> None:
    """Ranks with less data go on with zeros."""
    rank, size = hvd.rank(), hvd.size()
    for step in range(rank + 1):
        here = size - step  # the ranks that have not joined
        same(hvd.allreduce(torch.ones(3), op=hvd.Sum, name=f"step.{step}"), torch.full((3,), float(here)))
    last = hvd.join()
    assert 0 <= last < size
    same(hvd.allgather(torch.tensor([last])), torch.full((size,), last))
    same(hvd.allreduce(torch.ones(3), op=hvd.Sum), torch.full((3,), float(size)))


def main() -> None:
    """Everything."""
    torch.set_num_threads(1)
    hvd.init()
    checks = [check for name, check in sorted(globals().items()) if name.startswith("check_")]
    for check in checks:
        check()
        hvd.barrier()
    print(f"rank {hvd.rank()} of {hvd.size()}: {len(checks)} checks of collectives hold")
    hvd.shutdown()


if __name__ == "__main__":
    sys.exit(main())
