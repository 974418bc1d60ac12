"""Run by every rank, with the name of a backend: when results of `torch.distributed` are written.

All assertions hold on Gloo as well as on ronde, except that a message continues without its work.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from typing import Any, Callable

import torch
import torch.distributed as dist

import ronde.torch.distributed


def begin(backend: str) -> None:
    if backend == "ronde":
        ronde.torch.distributed.init_process_group()
        return
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank, size = int(os.environ["RONDE_RANK"]), int(os.environ["RONDE_SIZE"])
    dist.init_process_group(backend, store=dist.FileStore(sys.argv[2], size), rank=rank, world_size=size)


def new_group(ranks: list[int]) -> Any:
    if sys.argv[1] == "ronde":
        return ronde.torch.distributed.new_group(ranks)
    return dist.new_group(ranks)


def comes(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def check_results_without_a_wait() -> None:
    """They are written before a barrier or a later operation has been waited for, and never after."""
    for later in (dist.barrier, lambda: dist.all_reduce(torch.ones(3)), lambda: dist.broadcast(torch.ones(3), 0)):
        tensor, elsewhere = torch.full((1_000,), 1.0), torch.full((40_000,), 2.0)
        dist.all_reduce(tensor, async_op=True)
        dist.broadcast(elsewhere, 0, async_op=True)
        later()
        if later is dist.barrier:
            assert (tensor == size).all(), tensor[0]
        dist.barrier()
        tensor.fill_(100)
        elsewhere.fill_(100)
        for _ in range(20):
            dist.all_reduce(torch.ones(10), async_op=True)
        dist.barrier()
        time.sleep(0.02)
        assert (tensor == 100).all(), tensor[0]
        assert (elsewhere == 100).all(), elsewhere[0]


def check_the_roots_own_tensor() -> None:
    """A broadcast reads it, and does not write it."""
    for root in range(size):
        tensor = torch.full((50_000,), 7.0)
        work = dist.broadcast(tensor, root, async_op=True)
        if rank == root:
            work.wait()
            tensor.fill_(9)
            work.wait()
            assert (tensor == 9).all()
        else:
            work.wait()
            assert (tensor == 7).all()
        dist.barrier()


def check_they_are_written_without_a_wait() -> None:
    """When all ranks have called it, and without any further call."""
    tensor = torch.full((30_000,), float(rank))
    dist.all_reduce(tensor, async_op=True)
    assert comes(lambda: tensor[-1].item() == sum(range(size))), tensor
    dist.barrier()
    place = torch.zeros(5)
    kept = [dist.irecv(place, (rank - 1) % size), dist.isend(torch.full((5,), float(rank)), (rank + 1) % size)]
    if sys.argv[1] == "ronde":
        kept.clear()
    assert comes(lambda: place.tolist() == [float((rank - 1) % size)] * 5), place
    dist.barrier()


def check_is_completed() -> None:
    """`is_completed` is true only when the tensor has the result."""
    for count in (10, 100_000):
        for _ in range(20):
            tensor = torch.ones(count)
            work = dist.all_reduce(tensor, async_op=True)
            assert comes(work.is_completed)
            assert (tensor == size).all(), tensor
            assert work.is_success()


def check_futures() -> None:
    """They are done after a wait, and run callbacks once."""
    for count in (10, 100_000):
        tensor, called = torch.ones(count), []
        work = dist.all_reduce(tensor, async_op=True)
        future = work.get_future()
        then = future.then(lambda future, called=called: called.append(future.value()[0].sum().item()))
        work.wait()
        assert future.done()
        then.wait()
        assert called == [float(count * size)]
        assert work.get_future().done()
        late = work.get_future().then(lambda future: future.value()[0][0].item())
        assert late.wait() == size
    tensor = torch.ones(10)
    done = dist.all_reduce(tensor, async_op=True)
    done.wait()
    assert done.get_future().done()
    assert done.get_future().wait()[0] is tensor or torch.equal(done.get_future().wait()[0], tensor)


def check_sends_do_not_leak() -> None:
    """A send that no thread waits for releases its memory."""
    if sys.argv[1] != "ronde":
        return
    tensors = []
    for index in range(20):
        tensor = torch.full((1_000,), float(index))
        tensors.append(weakref.ref(tensor))
        work = dist.isend(tensor, (rank + 1) % size, tag=index)
        tensors.append(weakref.ref(work))
        del tensor, work
    for index in range(20):
        place = torch.empty(1_000)
        dist.recv(place, (rank - 1) % size, tag=index)
        assert (place == index).all()
    dist.barrier()

    def are_gone() -> bool:
        gc.collect()
        return all(reference() is None for reference in tensors)

    assert comes(are_gone), sum(reference() is not None for reference in tensors)


def check_callbacks_that_wait() -> None:
    """A callback may wait for operations that it begins, and for those that were begun before."""

    def begin_again(future: Any) -> float:
        again = future.value()[0].clone()
        dist.all_reduce(again, async_op=True).get_future().then(lambda future: future.value()).wait()
        value: float = again[0].item()
        return value

    for count in (10, 100_000):
        works = [dist.all_reduce(torch.ones(count), async_op=True) for _ in range(3)]
        chained = works[0].get_future().then(begin_again)
        assert chained.wait() == size * size
    second = torch.ones(100_000)
    first_work = dist.all_reduce(torch.ones(10), async_op=True)
    second_work = dist.all_reduce(second, async_op=True)
    second_future = second_work.get_future().then(lambda future: future.value()[0][0].item())
    assert first_work.get_future().then(lambda future: second_future.wait()).wait() == size


def check_many_in_flight() -> None:
    """A call returns without waiting for others, however many there are, and groups do not wait for each other."""
    one, other = new_group(list(range(size))), new_group(list(range(size)))
    groups = [one, other] if rank % 2 == 0 else [other, one]
    if rank == 0:
        # The others have called everything then, and were not waiting for this rank.
        for other_rank in range(1, size):
            dist.recv(torch.empty(1), other_rank)
    tensors = {}
    works = []
    for group in groups:
        tensors[group] = [torch.full((100,), float(index)) for index in range(100)]
        works += [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors[group]]
    if rank > 0:
        dist.send(torch.ones(1), 0)
    # Each of them: Gloo runs several at a time, so the last one may end before another.
    for work in works:
        work.wait()
    for group in groups:
        assert [tensor[0].item() for tensor in tensors[group]] == [float(index * size) for index in range(100)]
    dist.barrier()


def check_threads() -> None:
    """Two threads wait for operations of one group."""
    tensors = [torch.full((2_000,), float(index)) for index in range(30)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    failures: list[BaseException] = []

    def wait(works: list[Any]) -> None:
        try:
            for work in works:
                work.wait()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=wait, args=[part]) for part in (works[::2], works[1::2], works[::-1])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not failures, failures
    assert [tensor[0].item() for tensor in tensors] == [float(index * size) for index in range(30)]


begin(sys.argv[1])
rank, size = dist.get_rank(), dist.get_world_size()
for check in (
    check_results_without_a_wait,
    check_the_roots_own_tensor,
    check_they_are_written_without_a_wait,
    check_is_completed,
    check_futures,
    check_sends_do_not_leak,
    check_callbacks_that_wait,
    check_many_in_flight,
    check_threads,
):
    check()
    dist.barrier()
dist.destroy_process_group()
print("results come in order")
