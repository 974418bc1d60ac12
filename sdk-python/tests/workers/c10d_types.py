"""Run by every rank: `torch.distributed` with tensors that are not dense or of other types."""

from __future__ import annotations

import datetime
import functools
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import ronde.torch.distributed

ODD = [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint32, torch.uint64, torch.complex32, torch.complex64]


def mine(dtype: torch.dtype, of: int, *shape: int) -> torch.Tensor:
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape) % 5 + of
    return (numbers + (1j if dtype.is_complex else 0)).to(dtype)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compares bits, as some types have no comparison."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    bits = torch.uint8
    assert torch.equal(got.contiguous().view(-1).view(bits), want.contiguous().view(-1).view(bits)), (got, want)


def check_moves_of_odd_types() -> None:
    for dtype in ODD:
        places = [torch.zeros(2, 3, dtype=torch.float32).to(dtype) for _ in range(size)]
        dist.all_gather(places, mine(dtype, rank, 2, 3))
        for of, place in enumerate(places):
            same(place, mine(dtype, of, 2, 3))
        whole = torch.cat([torch.zeros(2, 3).to(dtype)] * size) if dtype != torch.complex32 else None
        if whole is not None and not dtype.is_complex:
            dist.all_gather_into_tensor(whole, mine(dtype, rank, 2, 3))
            same(whole.view(torch.uint8), torch.cat([mine(dtype, of, 2, 3).view(torch.uint8) for of in range(size)]))
        tensor = mine(dtype, rank, 40_000)
        dist.broadcast(tensor, size - 1)
        same(tensor, mine(dtype, size - 1, 40_000))
        if size > 1:
            work = dist.isend(mine(dtype, rank, 4), (rank + 1) % size)
            place = mine(dtype, 4, 4)
            dist.recv(place, (rank - 1) % size)
            work.wait()
            same(place, mine(dtype, (rank - 1) % size, 4))
        outputs = [mine(dtype, 4, 3) for _ in range(size)]
        dist.all_to_all(outputs, [mine(dtype, rank, 3) for _ in range(size)])
        for of, output in enumerate(outputs):
            same(output, mine(dtype, of, 3))
        places = [mine(dtype, 0, 2) for _ in range(size)]
        dist.gather(mine(dtype, rank, 2), places if rank == 0 else None)
        if rank == 0:
            for of, place in enumerate(places):
                same(place, mine(dtype, of, 2))
        place = mine(dtype, 4, 2)
        dist.scatter(place, [mine(dtype, of, 2) for of in range(size)] if rank == 0 else None)
        same(place, mine(dtype, rank, 2))


def check_sums_of_complex_numbers() -> None:
    for dtype in (torch.complex64, torch.complex128):
        want = sum(mine(dtype, of, 2, 3) for of in range(size))
        tensor = mine(dtype, rank, 3, 2).t()
        dist.all_reduce(tensor)
        same(tensor, sum(mine(dtype, of, 3, 2) for of in range(size)).t())
        dist.reduce(tensor := mine(dtype, rank, 2, 3), 0)
        same(tensor, want if rank == 0 else mine(dtype, rank, 2, 3))
        output = torch.empty(2, dtype=dtype)
        dist.reduce_scatter(output, [mine(dtype, rank + to, 2) for to in range(size)])
        same(output, sum(mine(dtype, of + rank, 2) for of in range(size)))
        dist.reduce_scatter_tensor(output, torch.cat([mine(dtype, rank + to, 2) for to in range(size)]))
        same(output, sum(mine(dtype, of + rank, 2) for of in range(size)))


def check_conjugated_views() -> None:
    """They are read and written by their own values, also where one rank's tensor alone is such a view.

    PyTorch itself refuses them in the other collectives and in messages.
    """
    total = sum(mine(torch.complex64, of, 2, 3) for of in range(size))
    for viewing in (range(size), [0], [size - 1]):

        def given(is_view: bool = rank in viewing) -> torch.Tensor:
            return mine(torch.complex64, rank, 2, 3).conj().resolve_conj().conj() if is_view else place()

        def place() -> torch.Tensor:
            return mine(torch.complex64, rank, 2, 3)

        assert given().is_conj() == (rank in viewing)
        dist.reduce(tensor := given(), 0)
        same(tensor.resolve_conj(), total if rank == 0 else place())
        dist.reduce_scatter(output := given(), [given() for _ in range(size)])
        same(output.resolve_conj(), total)


def check_shapes() -> None:
    """A result is written to the same number of elements, whatever their shape and layout."""
    row = torch.arange(6.0) + 10 * rank
    whole = torch.zeros(6, size).t()
    dist.all_gather_into_tensor(whole, row)
    assert torch.equal(whole, torch.stack([torch.arange(6.0) + 10 * of for of in range(size)]))
    output = torch.zeros(size, 3, 2, 1)
    dist.all_to_all_single(output, torch.arange(6.0 * size).reshape(size, 6) + 100 * rank)
    assert torch.equal(
        output.view(size, 6), torch.stack([torch.arange(6.0) + 6 * rank + 100 * of for of in range(size)])
    )
    empty = torch.zeros(3, 1, 0)
    dist.all_to_all_single(empty, torch.zeros(3, 0), *[[3, *[0] * (size - 1)]] * 2 if size != 3 else [None, None])
    strided = torch.zeros(4, 2)[:, 0]
    dist.reduce_scatter(strided, [torch.full((4,), float(to)) for to in range(size)])
    assert strided.tolist() == [float(rank * size)] * 4
    flat = torch.arange(6.0) if rank == 0 else torch.zeros(2, 3)
    dist.broadcast(flat, 0)
    assert torch.equal(flat.reshape(-1), torch.arange(6.0))
    wanting = torch.ones(3, requires_grad=True)
    dist.all_reduce(wanting)
    assert wanting.tolist() == [float(size)] * 3
    scalar, nothing, flag = torch.tensor(2.0), torch.empty(0, 3), torch.tensor([rank == 0, True, False])
    for tensor in (scalar, nothing):
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
    assert scalar.item() == 2.0 * size
    dist.broadcast(flag, 0)
    assert flag.tolist() == [True, True, False]


def check_coalesced_and_uneven() -> None:
    inputs = [torch.full((2,), float(rank)), torch.full((3, 2), 10.0 + rank)]
    outputs = [[torch.empty(2), torch.empty(3, 2)] for _ in range(size)]
    dist.all_gather_coalesced(outputs, inputs)
    for of, (first, second) in enumerate(outputs):
        assert first.tolist() == [of] * 2
        assert second.tolist() == [[10.0 + of] * 2] * 3
    tensors = [torch.ones(3), torch.ones(2, 2)]
    dist.all_reduce_coalesced(tensors)
    assert [tensor.sum().item() for tensor in tensors] == [3.0 * size, 4.0 * size]
    for dtype in (torch.float32, torch.float16, torch.int64, torch.complex64):
        for op in [dist.ReduceOp.SUM, dist.ReduceOp.AVG] + [dist.ReduceOp.MAX] * (not dtype.is_complex):
            parts = [mine(dtype, rank + to, to + 1, 2) for to in range(size)]
            output = torch.empty(rank + 1, 2, dtype=dtype)
            dist.reduce_scatter(output, parts, op)
            stacked = torch.stack([mine(dtype, of + rank, rank + 1, 2) for of in range(size)])
            want = stacked.amax(0) if op == dist.ReduceOp.MAX else stacked.sum(0)
            if op == dist.ReduceOp.AVG:
                want = want // size if dtype == torch.int64 else want / size
            torch.testing.assert_close(output, want)
    gathered = torch.empty(2 * size) if rank == 0 else None
    dist.gather_single(torch.full((2,), float(rank)), gathered)
    if gathered is not None:
        assert gathered[::2].tolist() == [float(of) for of in range(size)]


def check_results_can_be_resized() -> None:
    """As any tensor of PyTorch can, also those that are large enough to stay in shared memory."""
    reduced = torch.ones(50_000)
    dist.all_reduce(reduced)
    gathered = [torch.empty(50_000) for _ in range(size)]
    dist.all_gather(gathered, reduced)
    for tensor in [reduced, *gathered, functional.all_reduce(torch.ones(50_000), "sum", dist.group.WORLD)]:
        assert tensor.sum().item() in (50_000 * size, 50_000 * size * size)
        resized = tensor.wait() if isinstance(tensor, functional.AsyncCollectiveTensor) else tensor
        resized.resize_(100_000)
        resized.untyped_storage().resize_(0)


def check_sparse_tensors() -> None:
    for dtype in (torch.float32, torch.complex64, torch.int64):
        dense = torch.zeros(6, 2, dtype=dtype)
        dense[rank], dense[4] = rank + 1, 2
        twice = dense.to_sparse(1)
        tensor = torch.sparse_coo_tensor(
            torch.cat([twice.indices()] * 2, 1), torch.cat([twice.values()] * 2), dense.shape
        )
        dist.all_reduce(tensor)
        want = torch.zeros(6, 2, dtype=dtype)
        for of in range(size):
            want[of] += 2 * (of + 1)
        want[4] += 4 * size
        assert torch.equal(tensor.to_dense(), want), (tensor.to_dense(), want)
    mean = torch.sparse_coo_tensor([[rank]], [2.0 * size], (size,))
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    assert mean.to_dense().tolist() == [2.0] * size
    nothing = torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0), (size,))
    dist.all_reduce(nothing)
    assert nothing.to_dense().tolist() == [0.0] * size
    if size > 1:
        for tensor in (
            torch.sparse_coo_tensor([[0]], [1.0], (3 + rank,)),
            torch.ones(3) if rank == 0 else torch.sparse_coo_tensor([[0]], [1.0], (3,)),
        ):
            try:
                dist.all_reduce(tensor)
            except RuntimeError as error:
                assert "in flight" not in str(error), error
            else:
                raise AssertionError(f"{tensor} does not go with the others'")
            dist.barrier()


def check_sparse_embeddings() -> None:
    """DistributedDataParallel with a sparse embedding trains as one process does with a dense one."""
    torch.manual_seed(3)
    dense = torch.nn.Sequential(torch.nn.Embedding(20, 4), torch.nn.Linear(4, 2))
    model = torch.nn.Sequential(torch.nn.Embedding(20, 4, sparse=True), torch.nn.Linear(4, 2))
    model.load_state_dict(dense.state_dict())
    trained: Any = DistributedDataParallel(model)
    rows = [torch.tensor([1, 2, 2, 7]) + of for of in range(size)]
    for whole, data in ((dense, torch.cat(rows)), (trained, rows[rank])):
        optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            whole(data).pow(2).mean().backward()
            optimizer.step()
    for want, got in zip(dense.parameters(), model.parameters()):
        torch.testing.assert_close(got, want)


def check_power_sgd() -> None:
    """A hook whose callbacks wait for operations of their own."""
    torch.manual_seed(3)
    model: Any = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.ReLU(), torch.nn.Linear(300, 64)), bucket_cap_mb=0.03
    )
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(6):
        optimizer.zero_grad()
        rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * rank + step))
        model(rows).pow(2).mean().backward()
        optimizer.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everybodys = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(everybodys, weights)
    assert all(torch.equal(weights, other) for other in everybodys)


def check_hooks_that_call_collectives() -> None:
    """Their calls go together by bucket, whether a callback runs at once or later."""

    def hook(state, bucket):  # PyTorch takes annotations for types, and these would be texts
        buffer = bucket.buffer()
        first = dist.all_reduce(buffer.new_full((4,), float(bucket.index())), async_op=True).get_future()
        if (rank + bucket.index()) % 2:
            time.sleep(0.01)  # callbacks run at once then

        def again(future: Any) -> torch.Tensor:
            assert future.value()[0].tolist() == [float(size * bucket.index())] * 4
            number = buffer.new_full((4,), 10.0 * bucket.index())
            dist.all_reduce(number, async_op=True).get_future().wait()
            assert number.tolist() == [10.0 * size * bucket.index()] * 4
            dist.all_reduce(buffer, dist.ReduceOp.AVG)
            return buffer

        return first.then(again)

    torch.manual_seed(3)
    layers = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(8)])
    model: Any = DistributedDataParallel(layers, bucket_cap_mb=0.005)
    model.register_comm_hook(None, hook)
    for step in range(4):
        layers.zero_grad()
        model(torch.full((2, 32), float(rank + step))).sum().backward()
        gradient = layers[-1].bias.grad.clone()
        assert torch.equal(gradient, torch.full((32,), 2.0)), gradient
    dist.barrier()


def check_bits() -> None:
    for dtype in (torch.uint8, torch.int64, torch.bool):
        everybodys = [(mine(torch.int64, of, 4) % (2 if dtype == torch.bool else 100)).to(dtype) for of in range(size)]
        for op, operator in (
            (dist.ReduceOp.BAND, torch.bitwise_and),
            (dist.ReduceOp.BOR, torch.bitwise_or),
            (dist.ReduceOp.BXOR, torch.bitwise_xor),
        ):
            want = functools.reduce(operator, everybodys)
            tensor = everybodys[rank].clone()
            dist.all_reduce(tensor, op)
            assert torch.equal(tensor, want), (tensor, want)
            output = torch.empty(4, dtype=dtype)
            dist.reduce_scatter(output, [everybodys[rank]] * size, op)
            assert torch.equal(output, want)
            parts = [everybodys[rank][: 1 + to] for to in range(size)]
            dist.reduce_scatter(output := torch.empty(1 + rank, dtype=dtype), parts, op)
            assert torch.equal(output, want[: 1 + rank])


def check_receives_from_any_rank() -> None:
    if rank > 0:
        dist.send(torch.full((3,), float(rank)), 0, tag=4)
    seen = []
    for _ in range(size - 1 if rank == 0 else 0):
        place = torch.empty(3)
        source = dist.recv(place, tag=4)
        assert place.tolist() == [float(source)] * 3
        seen.append(source)
    assert rank > 0 or sorted(seen) == list(range(1, size))
    group = ronde.torch.distributed.new_group(list(range(size))[1:]) if size > 2 else None
    if group is not None and rank == 1:
        place = torch.empty(2)
        assert dist.recv(place, group=group) in range(2, size)
    elif group is not None and rank == 2:
        dist.send(torch.ones(2), 1, group=group)
    dist.barrier()


def check_monitored_barrier() -> None:
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=60))
    if size == 1:
        return
    if rank < size - 1:
        try:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=5), wait_all_ranks=True)
        except RuntimeError as error:
            assert f"Rank {size - 1} failed to pass monitoredBarrier" in str(error), error
            if rank > 0:
                assert f"Rank {rank} successfully reached monitoredBarrier, but received errors" in str(error), error
        else:
            raise AssertionError("the last rank does not come")
    dist.barrier()


ronde.torch.distributed.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
for check in (
    check_moves_of_odd_types,
    check_sums_of_complex_numbers,
    check_conjugated_views,
    check_shapes,
    check_coalesced_and_uneven,
    check_results_can_be_resized,
    check_sparse_tensors,
    check_sparse_embeddings,
    check_power_sgd,
    check_hooks_that_call_collectives,
    check_bits,
    check_receives_from_any_rank,
    check_monitored_barrier,
):
    check()
dist.destroy_process_group()
print("all types are right")
