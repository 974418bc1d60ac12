"""Threads of one process that are the ranks of a job, each with its own client; without any launcher."""

from __future__ import annotations

import sys
import threading
from typing import Any, Callable

import numpy
from thread_calls import together

import ronde
from ronde import own_sidecar
from ronde.without_launcher import settings_for_ranks

TIMEOUT_S = 60.0
THREADS_TIMEOUT_S = 2 * TIMEOUT_S
GET_TIMEOUT_S = 0.5
LARGE = 70_001  # elements; too large for messages


class Store:
    """A key-value store of threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        """Sets a value."""
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Waits for a value. Raises KeyError if there is none after a moment, as a store without `wait` has to."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values, GET_TIMEOUT_S)
            return self._values[key]


def as_ranks(size: int, body: Callable[[ronde.Client], Any]) -> list[Any]:
    """Runs a function on one thread for each rank of a new job. Returns their results or errors."""
    store = Store()

    def rank_of(rank: int) -> Callable[[], Any]:
        def run() -> Any:
            with ronde.connect(**settings_for_ranks(rank, size, store, TIMEOUT_S)) as client:
                assert (client.rank, client.size, client.local_size) == (rank, size, size)
                result = body(client)
                client.barrier("end")
                return result

        return run

    return together(*(rank_of(rank) for rank in range(size)), timeout_s=THREADS_TIMEOUT_S)


def vector(rank: int, count: int = LARGE) -> numpy.ndarray:
    """A rank's vector."""
    return numpy.random.default_rng(rank).normal(size=count)


def collectives(client: ronde.Client) -> bytes:
    """All kinds of collectives, with NumPy's results beside. Returns a result's bytes, to compare between threads."""
    rank, size, same = client.rank, client.size, numpy.testing.assert_array_equal
    every = [vector(each) for each in range(size)]
    for _ in range(3):
        total = client.allreduce(every[rank], op=ronde.Sum)
        numpy.testing.assert_allclose(total, numpy.sum(every, axis=0), rtol=1e-12, atol=1e-12)
        same(client.allreduce(every[rank], op=ronde.Max), numpy.max(every, axis=0))
        same(client.allreduce(numpy.array([rank]), op=ronde.Sum), [sum(range(size))])
    out = numpy.empty(LARGE)
    client.allreduce(every[rank], op=ronde.Min, out=out)
    same(out, numpy.min(every, axis=0))
    rows = client.allgather(numpy.full((rank + 1, 2), rank))
    same(rows, numpy.concatenate([numpy.full((each + 1, 2), each) for each in range(size)]))
    same(client.broadcast(every[rank], size - 1), every[-1])
    grid = numpy.arange(size * size).reshape(size, size)
    same(client.alltoall(grid[rank]), grid[:, rank])
    same(client.reduce_scatter(numpy.ones((size, 3)), op=ronde.Sum), numpy.full((1, 3), float(size)))
    group = client.grouped_allreduce([every[rank], numpy.ones(3)], op=ronde.Max)
    same(group[0], numpy.max(every, axis=0))
    same(group[1], numpy.ones(3))
    with_shared = client.empty((LARGE,), numpy.float64)
    with_shared[:] = every[rank]
    same(client.allreduce(with_shared, op=ronde.Max, name="zero-copy"), numpy.max(every, axis=0))
    following, before = (rank + 1) % size, (rank - 1) % size
    sending = client.send_async(every[rank], following, tag=3)
    same(client.recv(before, tag=3), every[before])
    sending.wait()
    return total.tobytes()


def sets(client: ronde.Client) -> None:
    """Process sets of all ranks' making and of the members' own, and a join in one."""
    rank, size = client.rank, client.size
    odd = client.add_process_set(range(1, size, 2))
    if odd.included():
        total = client.allreduce(numpy.array([rank]), op=ronde.Sum, process_set=odd)
        assert total[0] == sum(range(1, size, 2))
    if rank < 2:
        pair = client.add_process_set([0, 1], members_only=True)
        for step in range(rank + 1):
            total = client.allreduce(vector(rank), op=ronde.Sum, process_set=pair)
            want = vector(0) + vector(1) if step == 0 else vector(1)
            numpy.testing.assert_allclose(total, want, rtol=1e-12)
        assert client.join(process_set=pair) == 1
    client.barrier("sets")


def mismatch(client: ronde.Client) -> str:
    """Ranks that disagree get one error each, and go on."""
    try:
        client.allreduce(numpy.ones(2 + client.rank), name="odd")
    except ronde.MismatchError as error:
        text = str(error)
    assert client.allreduce(numpy.ones(1), op=ronde.Sum)[0] == client.size
    return text


def lost(client: ronde.Client) -> str:
    """The last rank leaves; the others' operations fail with an error that names it."""
    if client.rank == client.size - 1:
        client.close()
        return "left"
    try:
        client.allreduce(numpy.ones(3), name="without")
    except ronde.RondeError as error:
        return f"rank {error.rank}"
    raise AssertionError("an operation did without a rank")


def clients(size: int) -> None:
    """Jobs of threads, two of them at once."""
    both = together(*(lambda: as_ranks(size, collectives) for _ in range(2)), timeout_s=THREADS_TIMEOUT_S)
    for results in both:
        assert all(result == results[0] and isinstance(result, bytes) for result in results), results
    assert as_ranks(size, sets) == [None] * size
    texts = as_ranks(size, mismatch)
    assert len(set(texts)) == 1, texts
    assert "Mismatched ALLREDUCE tensor shapes" in texts[0], texts

    store = Store()

    def rank_of(rank: int) -> Callable[[], str]:
        def run() -> str:
            client = ronde.connect(**settings_for_ranks(rank, size, store, TIMEOUT_S))
            try:
                return lost(client)
            finally:
                client.close()

        return run

    found = together(*(rank_of(rank) for rank in range(size)), timeout_s=THREADS_TIMEOUT_S)
    assert found == [f"rank {size - 1}"] * (size - 1) + ["left"], found
    print(f"{size} threads with a client each: collectives hold", flush=True)


def torch_threads() -> None:
    """PyTorch's process groups of threads, as its test suite makes them: ronde refuses a second rank in a process."""
    import torch
    from torch.testing._internal.distributed import multi_threaded_pg

    import ronde.torch.distributed

    torch.distributed.distributed_c10d._world = multi_threaded_pg.ThreadLocalWorld()
    store = torch.distributed.HashStore()

    def rank_of(rank: int) -> Callable[[], None]:
        return lambda: torch.distributed.init_process_group("ronde", store=store, rank=rank, world_size=2)

    errors = together(*(rank_of(rank) for rank in range(2)), timeout_s=THREADS_TIMEOUT_S)
    refused = [rank for rank, error in enumerate(errors) if isinstance(error, ValueError)]
    assert len(refused) == 1, errors
    assert f"with rank {refused[0]} in a process that is rank {1 - refused[0]} already" in str(errors[refused[0]])
    # The other thread waits for that rank.
    alone = errors[1 - refused[0]]
    assert isinstance(alone, ronde.RondeError), errors
    assert "other ranks have not attached" in str(alone), alone
    print("a process has one rank of torch.distributed", flush=True)


def main() -> None:
    """Runs what the argument names."""
    if sys.argv[1] == "torch":
        torch_threads()
    else:
        clients(int(sys.argv[1]))
    own_sidecar.stop_all()


if __name__ == "__main__":
    main()
