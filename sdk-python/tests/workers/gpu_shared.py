"""Run by every rank on a software device whose sidecar uses the GPUs: what NCCL gives is what NumPy gives.

Rank r uses the GPU with its local rank's number. The elements are small integers, so that every order of additions
gives the same sum.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from typing import Any

import numpy
import own_sidecar
import software

import ronde
import ronde.device

# All are larger than what travels with control messages; the second one is not a multiple of anything.
ELEMENTS = [4_100, 70_001, 1 << 18]
DTYPES = ["float32", "float64", "float16", "int32", "int64", "uint8", "int8", "int16"]


class Bfloat16Array(software.DeviceArray):
    """An array of bfloat16: of uint16 to the interface, which has no such type."""


def _array_of(owner: Any, original: Any = ronde.device.array_of) -> ronde.device.Array:
    found: ronde.device.Array = original(owner)
    return found._replace(dtype=_Bfloat16Type()) if isinstance(owner, Bfloat16Array) else found


class _Bfloat16Type:
    name = "bfloat16"


# PyTorch's tensors on GPUs have this type, and PyTorch has no kernels for the software device.
ronde.device.array_of = _array_of


def contribution(rank: int, elements: int, dtype: str) -> numpy.ndarray[Any, Any]:
    """Returns what a rank contributes: each rank computes that of all."""
    return numpy.random.default_rng(rank + 10).integers(0, 6, elements).astype(dtype)


def all_of(client: ronde.Client, elements: int, dtype: str) -> list[numpy.ndarray[Any, Any]]:
    return [contribution(rank, elements, dtype) for rank in range(client.size)]


def check(found: software.DeviceArray, expected: Any) -> None:
    numpy.testing.assert_array_equal(found.read(), expected, strict=True)


def check_reductions(client: ronde.Client, stream: software.Stream) -> None:
    for elements in ELEMENTS:
        for dtype in DTYPES if elements < 1 << 18 else DTYPES[:1]:
            every = all_of(client, elements, dtype)
            mine = every[client.rank]
            source, target = software.DeviceArray(mine, stream), software.DeviceArray(mine, stream)
            client.allreduce(source, ronde.Sum, out=target)
            check(target, functools.reduce(numpy.add, every))
            check(source, mine)
            client.allreduce(source, ronde.Max, out=target)
            check(target, functools.reduce(numpy.maximum, every))
            client.allreduce(source, ronde.Product, out=source)
            product = functools.reduce(numpy.multiply, every)
            # Of more than four ranks it has more digits than float16.
            numpy.testing.assert_allclose(source.read(), product, rtol=2e-3 if dtype == "float16" else 0)
    elements = ELEMENTS[1]
    total = functools.reduce(numpy.add, all_of(client, elements, "float32"))
    array = software.DeviceArray(contribution(client.rank, elements, "float32"), stream)
    client.allreduce(array, ronde.Average, out=array)
    numpy.testing.assert_allclose(array.read(), total / client.size, rtol=1e-6)
    # Above what travels in control messages, which no GPU reduces.
    smallest = numpy.resize(numpy.arange(5, dtype="uint16"), ELEMENTS[1]).view("float16")
    array = software.DeviceArray(smallest, stream)
    client.allreduce(array, ronde.Average, out=array)
    check(array, smallest)


def check_bfloat16(client: ronde.Client, stream: software.Stream, *counters: str) -> None:
    """A sum and an average, the first operations of the session, which the sidecar counts as ones of these kinds."""
    every = all_of(client, 9_001, "float32")
    total = functools.reduce(numpy.add, every)
    for op, expected in ((ronde.Sum, total), (ronde.Average, total / client.size)):
        array = Bfloat16Array(ronde.Bfloat16.from_float32(every[client.rank]).bits, stream)
        client.allreduce(array, op, out=array)
        # Sums of so small integers are exact, and an average is rounded once.
        rounded = ronde.Bfloat16.from_float32(expected.astype("float32"))
        numpy.testing.assert_array_equal(array.read(), rounded.bits)

    def counted() -> dict[str, int]:
        page = status()
        return {name: page[name] for name in ("nccl_operations", "two_level_operations", "copied_operations")}

    # Results may come before they are counted.
    software.eventually("both are counted", lambda: sum(counted().values()) >= 2)
    found = counted()
    client.barrier()
    assert found == {name: counters.count(name) for name in found}, found


def check_broadcasts(client: ronde.Client, stream: software.Stream) -> None:
    for root in range(client.size):
        every = all_of(client, 70_001, "float64")
        array = software.DeviceArray(every[client.rank], stream)
        client.broadcast(array, root, out=array)
        check(array, every[root])


def check_own_memory(client: ronde.Client, ordinal: int) -> None:
    """Memory of ronde's own allocator is submitted in place: nothing is copied on the device before."""
    every = all_of(client, 50_000, "float32")
    whole = client.empty(60_000, "float32", device=ordinal)
    stream = software.Stream()
    # A part that does not begin where the allocation does.
    part = software.View(whole, 4 * 8_192, (50_000,), stream)
    for _ in range(3):
        part.write(every[client.rank])
        client.allreduce(part, ronde.Sum, out=part)
        check(part, functools.reduce(numpy.add, every))


def check_order(client: ronde.Client, stream: software.Stream) -> None:
    """An input that a stream has not computed yet; a result that must not come before what the stream still reads."""
    array = software.DeviceArray(numpy.zeros(50_000, "uint8"), stream)
    for step in range(1, 4):
        stream.hold(True)
        array.fill(step)
        handle = client.allreduce_async(array, ronde.Sum, out=array)
        assert not handle.poll(), "its input is not there"
        stream.hold(False)
        handle.wait()
        check(array, numpy.full(50_000, step * client.size, "uint8"))
    handles = []
    arrays = [software.DeviceArray(contribution(client.rank, 5_000 + at, "int32"), stream) for at in range(12)]
    for at, each in enumerate(arrays):
        handles.append(client.allreduce_async(each, ronde.Sum, f"many.{at}", out=each))
    for at in reversed(range(len(arrays))):
        handles[at].wait()
    for at, each in enumerate(arrays):
        check(each, functools.reduce(numpy.add, all_of(client, 5_000 + at, "int32")))


def check_mixed(client: ronde.Client, stream: software.Stream) -> None:
    """One rank's tensor is in main memory: the sidecar copies the others'."""
    every = all_of(client, 9_001, "float32")
    total = functools.reduce(numpy.add, every)
    if client.rank == 0:
        numpy.testing.assert_array_equal(client.allreduce(every[0], ronde.Sum, "mixed"), total)
    else:
        array = software.DeviceArray(every[client.rank], stream)
        client.allreduce(array, ronde.Sum, "mixed", out=array)
        check(array, total)
    array = software.DeviceArray(every[client.rank], stream)
    host = numpy.empty(9_001, "float32")
    client.allreduce(array, ronde.Sum, "to the host", out=host)
    numpy.testing.assert_array_equal(host, total)


def check_others(client: ronde.Client, stream: software.Stream) -> None:
    """Operations that the sidecar does not take in device memory, and tensors that travel with messages."""
    every = all_of(client, 5_000, "float32")
    array = software.DeviceArray(every[client.rank], stream)
    gathered = software.DeviceArray(numpy.zeros(5_000 * client.size, "float32"), stream)
    client.allgather(array, out=gathered)
    check(gathered, numpy.concatenate(every))
    small = software.DeviceArray(numpy.full(10, client.rank, "float32"), stream)
    client.allreduce(small, ronde.Sum, out=small)
    check(small, numpy.full(10, sum(range(client.size)), "float32"))


def check_small_beside_long(client: ronde.Client, stream: software.Stream) -> None:
    """A small tensor, which travels in main memory, leaves a long one that is ready with it to NCCL."""
    client.barrier()
    before = counted_page()
    every = all_of(client, 70_001, "float32")
    long = software.DeviceArray(every[client.rank], stream)
    small = software.DeviceArray(every[client.rank][:10], stream)
    client.grouped_allreduce([long, small], ronde.Sum, out=[long, small])
    total = functools.reduce(numpy.add, every)
    check(long, total)
    check(small, total[:10])
    if "RONDE_TEST_GPU" in os.environ:
        software.eventually("it is counted", lambda: status() != before)
        return
    expected = before["nccl_operations"] + 1
    software.eventually("it is counted", lambda: status()["nccl_operations"] == expected)
    after = counted_page()
    client.barrier()
    assert after["copied_operations"] == before["copied_operations"], (before, after)
    assert after["nccl_operations"] == expected, (before, after)


def counted_page() -> dict[str, Any]:
    """Returns the page when it has not changed for half a second: results may come before they are counted."""
    found, since = status(), time.monotonic()
    deadline = since + 20
    while time.monotonic() - since < 0.5:
        assert time.monotonic() < deadline, found
        time.sleep(0.02)
        if (now := status()) != found:
            found, since = now, time.monotonic()
    return found


def status() -> dict[str, Any]:
    found: dict[str, Any] = own_sidecar.page()["gpu"]
    return found


def main() -> None:
    client = ronde.connect()
    ordinal = int(os.environ.get("RONDE_TEST_GPU", client.local_rank))
    software.use(ordinal)
    stream = software.Stream()
    # Ranks that share a GPU are not NCCL's; and in bfloat16 it has no exact third.
    is_shared = "RONDE_TEST_GPU" in os.environ
    kinds = (is_shared, is_shared or client.size == 3)
    check_bfloat16(client, stream, *("copied_operations" if copied else "nccl_operations" for copied in kinds))
    check_reductions(client, stream)
    check_broadcasts(client, stream)
    check_own_memory(client, ordinal)
    check_order(client, stream)
    check_mixed(client, stream)
    check_others(client, stream)
    check_small_beside_long(client, stream)
    client.barrier()
    if client.local_rank == 0:
        print("gpu", json.dumps(status()), flush=True)
    client.barrier()
    client.close()
    print("NCCL holds", file=sys.stdout)


if __name__ == "__main__":
    main()
