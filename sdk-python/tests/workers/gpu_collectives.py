"""Run by every rank on a software device: collectives on its memory give the bits that those on main memory give."""

from __future__ import annotations

import math
from typing import Any

import numpy
import software

import ronde

# The last ones are larger than a chunk, or not a multiple of anything.
SHAPES = [(), (1,), (1000,), (7, 11), (0,), (70_001,), ((5 << 20) // 4,)]
DTYPES = ["float32", "float64", "float16", "int32", "uint8", "int64"]


def mine(client: ronde.Client, shape: tuple[int, ...], dtype: str) -> numpy.ndarray[Any, Any]:
    random = numpy.random.default_rng(client.rank + 10)
    return (random.random(shape) * 100).astype(dtype)


def check(found: software.DeviceArray, expected: Any) -> None:
    numpy.testing.assert_array_equal(found.read(), numpy.asarray(expected).reshape(found.shape), strict=True)


def check_reductions(client: ronde.Client, stream: software.Stream | None) -> None:
    for shape in SHAPES:
        for dtype in DTYPES if math.prod(shape) < 1 << 20 else DTYPES[:1]:
            host = mine(client, shape, dtype)
            for op in (ronde.Sum, ronde.Average, ronde.Max):
                expected = client.allreduce(host, op)
                source, target = (software.DeviceArray(host, stream) for _ in range(2))
                assert client.allreduce(source, op, out=target) is target
                check(target, expected)
                check(source, host)
                client.allreduce(source, op, out=source)
                check(source, expected)


def check_others(client: ronde.Client, stream: software.Stream | None) -> None:
    size, rank = client.size, client.rank
    host = mine(client, (size * 4, 3), "float32")
    source = software.DeviceArray(host, stream)
    whole = software.DeviceArray(numpy.zeros((size * size * 4, 3), "float32"), stream)
    check(client.allgather(source, out=whole), client.allgather(host))
    share = software.DeviceArray(numpy.zeros((4, 3), "float32"), stream)
    check(client.reduce_scatter(source, ronde.Sum, out=share), client.reduce_scatter(host, ronde.Sum))
    exchanged = software.DeviceArray(numpy.zeros((size * 4, 3), "float32"), stream)
    received = client.alltoall(source, out=exchanged)
    check(received, client.alltoall(host))
    for root in range(size):
        target = software.DeviceArray(host, stream)
        client.broadcast(target, root, out=target)
        check(target, client.broadcast(host, root))
    # Some of a group on the device, and another half on each rank.
    parts = [mine(client, (elements,), "float64") for elements in (5, 70_000, 0, 3)]
    expected = client.grouped_allreduce(parts, ronde.Sum)
    mixed = [software.DeviceArray(part, stream) if (index + rank) % 2 else part for index, part in enumerate(parts)]
    for found, right in zip(client.grouped_allreduce(mixed, ronde.Sum, out=mixed), expected):
        numpy.testing.assert_array_equal(found.read() if isinstance(found, software.DeviceArray) else found, right)


def check_many(client: ronde.Client, stream: software.Stream) -> None:
    """Many in flight, waited for in another order than they were submitted in."""
    hosts = [mine(client, (elements * 1000 + 1,), "float32") for elements in range(20)]
    arrays = [software.DeviceArray(host, stream) for host in hosts]
    handles = [client.allreduce_async(array, ronde.Sum, f"many.{at}", out=array) for at, array in enumerate(arrays)]
    for at in reversed(range(len(handles))):
        assert handles[at].wait() is arrays[at]
    for array, host in zip(arrays, hosts):
        check(array, client.allreduce(host, ronde.Sum))


def main() -> None:
    client = ronde.connect()
    software.use()
    stream = software.Stream()
    for given in (None, stream):
        check_reductions(client, given)
        check_others(client, given)
    check_many(client, stream)
    if client.rank == 0:  # the others' tensor is in main memory
        array = software.DeviceArray(numpy.full(100_000, 1.0), stream)
        check(client.allreduce(array, ronde.Sum, out=array), numpy.full(100_000, float(client.size)))
    else:
        client.allreduce(numpy.full(100_000, 1.0), ronde.Sum)
    segments = client.shared_memory.segments
    assert software.count("registrations_made") <= segments, "each segment is registered once"
    software.eventually("slots are released", lambda: client.shared_memory.slots == 0)
    client.close()
    print("devices hold")


if __name__ == "__main__":
    main()
