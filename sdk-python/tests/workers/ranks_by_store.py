"""Processes or threads that number themselves: they meet over a store of PyTorch, without any launcher."""

from __future__ import annotations

import multiprocessing
import pathlib
import sys
import threading
import time

import numpy
import torch

import ronde
from ronde import own_sidecar
from ronde.without_launcher import settings_for_ranks

SESSIONS = 3


def session(rank: int, size: int, store: object) -> float:
    """Meets, adds ones, and ends the session."""
    with ronde.connect(**settings_for_ranks(rank, size, store)) as client:
        assert (client.rank, client.size) == (rank, size)
        total = client.allreduce(numpy.ones(1000), ronde.Sum, "sum")
        client.barrier("end")
    return float(total[0])


def job(rank: int, path: str) -> None:
    """Several sessions, one after another, in one store."""
    store = torch.distributed.FileStore(path, -1)
    for number in range(SESSIONS):
        total = session(rank, 3, store)
        sys.stdout.write(f"rank {rank} of 3, session {number}: {total:.0f}\n")
        sys.stdout.flush()


def early(rank: int, path: str) -> None:
    """Rank 0 ends at once; rank 1 takes its result and closes when even the sidecar has ended."""
    store = torch.distributed.FileStore(path, -1)
    client = ronde.connect(**settings_for_ranks(rank, 2, store))
    handle = client.allreduce_async(numpy.ones(100_000), ronde.Sum, "sum")
    if rank == 0:
        handle.wait()
    # Rank 1 submits it, and waits for it only in the end.
    client.barrier("submitted")
    ended = pathlib.Path(path + ".ended")
    if rank == 0:
        client.close()
        ended.write_text("")
        return
    while not ended.exists():
        time.sleep(0.02)
    time.sleep(7)
    print(f"rank 1 has its result {handle.wait()[0]} after rank 0 has ended", flush=True)
    client.close()


def threads() -> None:
    """Worlds of threads: two at a time, then one after another; sidecars whose workers have left end."""
    stores = [torch.distributed.HashStore() for _ in range(2)]
    begin = threading.Barrier(4)
    totals = []

    def run(rank: int, store: object) -> None:
        begin.wait(60)
        totals.append(session(rank, 2, store))

    workers = [threading.Thread(target=run, args=(rank, store)) for store in stores for rank in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert totals == [2.0] * 4, totals
    for _ in range(4):
        settings = settings_for_ranks(0, 1, stores[0])
        with ronde.connect(**settings) as client:
            assert client.size == 1
    deadline = time.monotonic() + 20
    running = [each for each in own_sidecar._started.sidecars if each.is_running()]
    while len(running) > 1 and time.monotonic() < deadline:
        time.sleep(0.05)
        running = [each for each in running if each.is_running()]
    print(f"sidecars at the end of the loop: {len(running)}", flush=True)


def main() -> None:
    """Runs the job that the arguments name."""
    if sys.argv[1] == "threads":
        threads()
        return
    target, ranks = {"job": (job, 3), "early": (early, 2)}[sys.argv[1]]
    context = multiprocessing.get_context(sys.argv[2])
    processes = [context.Process(target=target, args=(rank, sys.argv[3])) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
    sys.exit(max(1 if process.exitcode is None else abs(process.exitcode) for process in processes))


if __name__ == "__main__":
    main()
