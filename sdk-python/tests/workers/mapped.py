"""Run by every rank, with an arena of 16 MiB: results that stay in shared memory, their bits, lifetimes and pages."""

from __future__ import annotations

import gc
import os
import pathlib
import sys
import traceback
from typing import Any, Callable

import numpy
import own_sidecar

import ronde

DTYPES = ["uint8", "int8", "uint16", "int16", "int32", "int64", "float16", "float32", "float64", "bool"]
# Of the shortest type more than 64 KiB, also for a share of them.
ROWS, COLUMNS = 840, 321
ARENA_BYTES = 16 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
STEADY = 40  # operations of a loop
IS_MAPPED = os.environ.get("RONDE_MAPPED") != "0"


def contribution(rank: int, dtype: str, rows: int = ROWS) -> numpy.ndarray:
    """Small numbers, the same on every rank for each."""
    return numpy.random.default_rng([rank, rows]).integers(0, 4, (rows, COLUMNS)).astype(dtype)


def slots(client: ronde.Client) -> int:
    """Inputs in flight and results that live."""
    return client.shared_memory.slots


def check_bits(client: ronde.Client) -> None:
    """Each result equals the copied one, in type and shape."""
    for dtype in DTYPES:
        mine = contribution(client.rank, dtype)
        own = numpy.array_split(mine, client.size)[client.rank]
        ways: dict[str, tuple[Callable[..., Any], numpy.ndarray]] = {
            "allreduce": (lambda out, x=mine: client.allreduce(x, ronde.Sum, out=out), mine),
            "broadcast": (lambda out, x=mine: client.broadcast(x, client.size - 1, out=out), mine),
            "allgather": (lambda out, x=own: client.allgather(x, out=out), mine),
            "reduce_scatter": (lambda out, x=mine: client.reduce_scatter(x, ronde.Max, out=out), own),
            "alltoall": (lambda out, x=mine: client.alltoall(x, out=out), mine),
        }
        for what, (way, like) in ways.items():
            copied = numpy.empty_like(like)
            assert way(copied) is copied
            assert slots(client) == 0, what
            result = way(None)
            expected = 1 if IS_MAPPED else 0
            # What is gathered of ranks that differ is not known to fit.
            is_known = what != "allgather" or ROWS % client.size == 0
            assert slots(client) == (expected if is_known else 0), (what, dtype, slots(client))
            assert (result.dtype, result.shape) == (like.dtype, like.shape), (what, dtype)
            numpy.testing.assert_array_equal(result, copied, err_msg=f"{what} {dtype}")
            result[0] = 1
            assert result.flags.c_contiguous
            del result
            assert slots(client) == 0, (what, dtype)


def check_uneven_gathers(client: ronde.Client) -> None:
    """A result whose size depends on other ranks is copied if it does not fit a mapped slot."""
    tensors = [contribution(rank, "float32", 300 + rank) for rank in range(client.size)]
    whole = numpy.concatenate(tensors)
    for _ in range(3):
        numpy.testing.assert_array_equal(client.allgather(tensors[client.rank]), whole)
        assert slots(client) == 0 or client.size == 1
    out = numpy.empty_like(whole)
    numpy.testing.assert_array_equal(client.allgather(tensors[client.rank], out=out), whole)
    if client.size > 1:
        try:
            client.allgather(tensors[client.rank], out=out[:-1])
        except ValueError as error:
            assert "the result is of shape" in str(error), error
        else:
            raise AssertionError("a result was written where it does not fit")
    gc.collect()  # the error's frames
    results = client.grouped_allreduce([tensors[0], tensors[0] + 1], ronde.Sum)
    assert slots(client) == (2 if IS_MAPPED else 0)
    numpy.testing.assert_array_equal(results[1], (tensors[0] + 1) * client.size)


def check_lifetimes(client: ronde.Client) -> None:
    """A result lives as long as the last array that views it; dropped operations release their memory."""
    mine = contribution(client.rank, "float32")
    result = client.allreduce(mine, ronde.Sum)
    want = result.copy()
    row = result[7].reshape(-1)[3:]
    del result
    held = slots(client)
    assert held == (1 if IS_MAPPED else 0), client.shared_memory
    for _ in range(5):
        client.allreduce(mine + 1, ronde.Sum)
    numpy.testing.assert_array_equal(row, want[7][3:])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            numpy.testing.assert_array_equal(row, want[7][3:])
            row[:] = -1  # nothing to the parent
            del row
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert slots(client) == held
    numpy.testing.assert_array_equal(row, want[7][3:])
    del row
    assert slots(client) == 0
    if client.size == 1:
        return
    # Given up by this rank before anybody else could submit it; its failure comes before the barrier's end.
    handle = client.allreduce_async(mine, ronde.Sum, name=f"only rank {client.rank}")
    assert slots(client) == (2 if IS_MAPPED else 1)
    del handle
    client.barrier()
    assert slots(client) == 0


def check_room(client: ronde.Client) -> None:
    """However many results live, half of the arena stays for inputs; further results are copied."""
    mine = contribution(client.rank, "float64")
    assert mine.nbytes * 10 > ARENA_BYTES
    results = [client.allreduce(mine + step, ronde.Sum) for step in range(10)]
    assert 0 < slots(client) < 5 or not IS_MAPPED
    assert client.shared_memory.in_use_bytes <= ARENA_BYTES // 2
    for step, result in enumerate(results):
        numpy.testing.assert_array_equal(result, results[0] + step * client.size)
    results.clear()
    assert client.shared_memory.in_use_bytes == 0


def faults(process: int | str) -> int:
    """Returns a process's page faults."""
    stat = pathlib.Path(f"/proc/{process}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[7])


def check_steady_state(client: ronde.Client) -> None:
    """A loop meets no fresh pages: not a thousandth of those of its tensors, neither here nor in the sidecar."""
    mine = contribution(client.rank, "float32")
    into = mine.copy()
    ways: list[Callable[[], Any]] = [lambda: client.allreduce(mine, ronde.Max, out=into)]
    if IS_MAPPED:
        ways.append(lambda: client.allreduce(mine, ronde.Max))
    sidecar = own_sidecar.process()
    for way in ways:
        for _ in range(5):
            way()
        client.barrier()
        before = [client.shared_memory, faults("self"), faults(sidecar)]
        for _ in range(STEADY):
            way()
        after = [client.shared_memory, faults("self"), faults(sidecar)]
        assert after[0] == before[0], (before, after)
        pages = STEADY * mine.nbytes // PAGE_BYTES
        # Some for stacks, queues and whatever else grows now and then.
        for process in (1, 2):
            assert after[process] - before[process] < pages // 20, (before, after, pages)
        client.barrier()


def main() -> None:
    """Runs all checks on one session, whose last result outlives it."""
    with ronde.connect() as client:
        check_bits(client)
        check_uneven_gathers(client)
        check_lifetimes(client)
        check_room(client)
        check_steady_state(client)
        result = client.allreduce(contribution(0, "int64"), ronde.Sum)
        client.barrier()
        print(f"rank {client.rank}: results stay where they are", flush=True)
        client.barrier("end")
        size = client.size
    assert slots(client) == 0
    numpy.testing.assert_array_equal(result, contribution(0, "int64") * size)
    result += 1
    del client, result


if __name__ == "__main__":
    main()
