"""Run by every rank on a software device: collectives in two levels give what those on main memory give.

Each rank has a device of its own. Which operations have two levels is counted, so that a test cannot pass by staging.
"""

from __future__ import annotations

from typing import Any

import numpy
import own_sidecar
import software

import ronde

# Counts that neither two nor three ranks of a host divide, too.
COUNTS = [1, 2, 3, 7, 1000, 70_001]
DTYPES = ["float32", "float64", "float16", "int8", "uint8", "int32", "int64"]
Values = numpy.ndarray[Any, Any]


def values(rank: int, shape: tuple[int, ...], dtype: str) -> Values:
    """Small integers, whose sums are exact in each type."""
    random = numpy.random.default_rng(rank + 10)
    return random.integers(1, 5, shape).astype(dtype)


class Case:
    """The ranks of a job, and what they have in two levels so far."""

    def __init__(self, client: ronde.Client, stream: software.Stream | None) -> None:
        self.client, self.stream = client, stream
        self.counted = 0

    def all(self, shape: tuple[int, ...], dtype: str) -> list[Values]:
        return [values(rank, shape, dtype) for rank in range(self.client.size)]

    def mine(self, shape: tuple[int, ...], dtype: str) -> software.DeviceArray:
        return software.DeviceArray(values(self.client.rank, shape, dtype), self.stream)

    def empty(self, shape: tuple[int, ...], dtype: str) -> software.DeviceArray:
        return software.DeviceArray(numpy.zeros(shape, dtype), self.stream)

    def check(self, found: software.DeviceArray, expected: Values, operations: int = 1) -> None:
        """Checks a result, and that it had two levels (or, with 0 operations, one)."""
        exact = expected.astype(found.dtype)
        if exact.dtype.kind == "f":
            # The average of three halves is rounded once more or less.
            tolerance = {2: 2e-3, 4: 1e-6, 8: 1e-14}[exact.dtype.itemsize]
            numpy.testing.assert_allclose(found.read(), exact, rtol=tolerance, strict=True)
        else:
            numpy.testing.assert_array_equal(found.read(), exact, strict=True)
        self.counted += operations
        assert self.client.gpu_levels.operations == self.counted, self.client.gpu_levels


def check_reductions(case: Case) -> None:
    reductions = {
        ronde.Sum: lambda each: numpy.sum(each, axis=0, dtype=each[0].dtype),
        ronde.Max: lambda each: numpy.max(each, axis=0),
        ronde.Min: lambda each: numpy.min(each, axis=0),
        ronde.Product: lambda each: numpy.prod(each, axis=0, dtype=each[0].dtype),
    }
    for count in COUNTS:
        for dtype in DTYPES if count < 10 else DTYPES[:1]:
            for op, reduce in reductions.items():
                found = case.mine((count,), dtype)
                case.client.allreduce(found, op, out=found)
                case.check(found, reduce(case.all((count,), dtype)))
    for dtype in ("float32", "float64", "float16"):
        every = numpy.stack(case.all((7, 3), dtype)).astype("float64")
        # NCCL does not multiply float16 by less than 1, by which small numbers lose digits.
        found = case.mine((7, 3), dtype)
        case.client.allreduce(found, ronde.Average, out=found)
        case.check(found, every.mean(axis=0), int(dtype != "float16"))
        found = case.mine((7, 3), dtype)
        case.client.allreduce(found, ronde.Sum, prescale_factor=0.5, postscale_factor=3.0, out=found)
        case.check(found, every.sum(axis=0) * 1.5, int(dtype != "float16" or case.client.cross_size == 1))
    smallest = numpy.arange(5, dtype="uint16").view("float16")
    found = software.DeviceArray(smallest, case.stream)
    case.client.allreduce(found, ronde.Average, out=found)
    numpy.testing.assert_array_equal(found.read(), smallest)


def check_others(case: Case) -> None:
    client = case.client
    for shape in [(1,), (5, 3), (4097,)]:
        for root in range(client.size):
            found = case.mine(shape, "int16")
            client.broadcast(found, root, out=found)
            case.check(found, case.all(shape, "int16")[root])
        whole = case.empty((shape[0] * client.size, *shape[1:]), "uint8")
        client.allgather(case.mine(shape, "uint8"), out=whole)
        case.check(whole, numpy.concatenate(case.all(shape, "uint8")))
    for rows in (client.size, 3 * client.size + 1, 1):
        total = numpy.sum(case.all((rows, 3), "float32"), axis=0)
        share = numpy.array_split(total, client.size)[client.rank]
        found = case.empty(share.shape, "float32")
        client.reduce_scatter(case.mine((rows, 3), "float32"), ronde.Sum, out=found)
        case.check(found, share)


def check_one_level(case: Case) -> None:
    """What NCCL cannot do, or what ranks do not agree on, has one level and the same result."""
    client = case.client
    for shape, dtype, op in [((0,), "float32", ronde.Sum), ((9,), "int16", ronde.Sum), ((9,), "int32", ronde.Average)]:
        found = case.mine(shape, dtype)
        client.allreduce(found, op, out=found)
        total = numpy.sum(case.all(shape, dtype), axis=0)
        case.check(found, total if op == ronde.Sum else numpy.trunc(total / client.size), 0)
    # The lengths differ, which the tickets find out.
    rows = [rank + 1 for rank in range(client.size)]
    gathered = case.empty((sum(rows), 2), "float32")
    client.allgather(case.mine((rows[client.rank], 2), "float32"), out=gathered)
    expected = numpy.concatenate([values(rank, (rows[rank], 2), "float32") for rank in range(client.size)])
    case.check(gathered, expected, 0)
    different = case.mine((5 + client.rank,), "float32")
    try:
        client.allreduce(different, ronde.Sum, "different", out=different)
    except ronde.MismatchError as error:
        assert "different" in str(error), error
    else:
        raise AssertionError("the shapes differ")


def check_order(case: Case) -> None:
    """Ranks submit in different orders, and wait in others."""
    client, count = case.client, 12
    arrays = [case.mine((1000 + at,), "float32") for at in range(count)]
    order = numpy.random.default_rng(client.rank).permutation(count)
    handles = {}
    for at in order:
        handles[at] = client.allreduce_async(arrays[at], ronde.Sum, f"shuffled.{at}", out=arrays[at])
    for at in reversed(order):
        handles[at].wait()
    case.counted += count - 1
    for at, array in enumerate(arrays):
        case.counted += at == 0
        case.check(array, numpy.sum(case.all((1000 + at,), "float32"), axis=0), 0)
    grouped = [case.mine((shape,), "float64") for shape in (5, 70_000, 3)]
    client.grouped_allreduce(grouped, ronde.Sum, out=grouped)
    case.counted += 2
    for at, (array, shape) in enumerate(zip(grouped, (5, 70_000, 3))):
        case.check(array, numpy.sum(case.all((shape,), "float64"), axis=0), int(at == 0))


def check_steps(case: Case) -> None:
    """Steps that repeat, which the ranks perform under a schedule, each in an order of its own."""
    client, steps, count = case.client, 12, 6
    random = numpy.random.default_rng(client.rank + 100)
    arrays = [case.mine((500 + at,), "float64") for at in range(count)]
    for _ in range(steps):
        handles = {}
        for at in random.permutation(count):
            handles[at] = client.allreduce_async(arrays[at], ronde.Average, f"step.{at}", out=arrays[at])
        for at in random.permutation(count):
            handles[at].wait()
    case.counted += steps * count - 1
    for at, array in enumerate(arrays):
        expected = numpy.mean(case.all((500 + at,), "float64"), axis=0)
        case.check(array, expected, int(at == 0))


def check_sets(case: Case) -> None:
    """A set of the ranks of one host, and one across hosts."""
    client = case.client
    pairs = [[rank, rank + 1] for rank in range(0, client.size - 1, 2)]
    sets = [client.add_process_set(pair) for pair in pairs if len(pair) < client.size]
    for each in sets:
        if each.included():
            found = case.mine((33,), "float32")
            client.allreduce(found, ronde.Sum, out=found, process_set=each)
            expected = numpy.sum([values(rank, (33,), "float32") for rank in each.ranks], axis=0)
            case.check(found, expected)


def check_join(case: Case) -> None:
    """A rank that has joined takes part with zeros, in one level; afterwards there are two again."""
    client = case.client
    if client.rank:
        found = case.mine((100,), "float32")
        handle = client.allreduce_async(found, ronde.Sum, "uneven", out=found)
        joined = client.join_async()
        handle.wait()
        joined.wait()
        case.check(found, numpy.sum(case.all((100,), "float32")[1:], axis=0), 0)
    else:
        client.join()
    found = case.mine((100,), "float32")
    client.allreduce(found, ronde.Sum, out=found)
    case.check(found, numpy.sum(case.all((100,), "float32"), axis=0))


def check_status(client: ronde.Client) -> None:
    """The sidecar shows the levels and the transport of each of its GPUs, and counts their bytes."""
    client.barrier()
    if client.local_rank == 0:
        software.eventually("all ranks have reported", lambda: len(levels_of(client)) == client.local_size)
        for used in levels_of(client).values():
            two, one = used[2], used[1]
            assert two["transport"] == "NCCL 2.23.4 within the host", used
            assert two["operations"] > 10, used
            assert one["transport"] == "host memory", used
            assert one["operations"] > 0, used
            assert two["bytes"] > one["bytes"] > 0, used
    client.barrier()


def levels_of(client: ronde.Client) -> dict[int, dict[int, Any]]:
    """Returns what `ronde status` shows of the GPUs of this sidecar's ranks, by rank and level."""
    return {
        each["rank"]: {level["level"]: level for level in each["levels"]}
        for each in own_sidecar.page().get("gpu_levels", [])
        if len(each["levels"]) == 2
    }


def main() -> None:
    client = ronde.connect(operation_timeout=60)
    software.use(client.local_rank)
    stream = software.Stream()
    case = Case(client, stream)
    for check in (check_reductions, check_others, check_one_level, check_order, check_steps, check_sets, check_join):
        check(case)
        print(check.__name__, flush=True)
    check_status(client)
    counts = client.gpu_levels
    assert counts.bytes_inside > 0, counts
    assert (counts.bytes_between > 0) == (client.cross_size > 1), counts
    software.eventually("slots are released", lambda: client.shared_memory.slots == 0)
    client.close()
    software.eventually("communicators are ended", lambda: software.count("communicators") == 0)
    print("levels hold")


if __name__ == "__main__":
    main()
