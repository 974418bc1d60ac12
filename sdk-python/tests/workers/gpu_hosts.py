"""Run by every rank of a job whose sidecars use their GPUs: NCCL within a host, ronde between hosts.

Each rank computes what one process gets from all ranks' arrays. The elements are small integers, so that every order of
additions gives the same sum.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import gpu_shared
import numpy
import software
from gpu_shared import Bfloat16Array, all_of, check, contribution

import ronde

Values = numpy.ndarray[Any, Any]
# One more and one less than what all GPUs share equally, and lengths without a rest.
ELEMENTS = [1_025, 2_048, 4_095, 4_097, 16_384, 70_001]


def total_of(client: ronde.Client, elements: int, dtype: str) -> Values:
    total: Values = functools.reduce(numpy.add, all_of(client, elements, dtype))
    return total


def check_ragged(client: ronde.Client, stream: software.Stream) -> None:
    """Lengths that the GPUs of a host do not divide, to another array and in place."""
    for elements in ELEMENTS:
        for dtype in ("float32", "uint8", "float64"):
            if elements * numpy.dtype(dtype).itemsize <= 4_096:
                continue
            mine = contribution(client.rank, elements, dtype)
            source, target = software.DeviceArray(mine, stream), software.DeviceArray(mine, stream)
            client.allreduce(source, ronde.Sum, out=target)
            check(target, total_of(client, elements, dtype))
            check(source, mine)
            client.allreduce(source, ronde.Sum, out=source)
            check(source, total_of(client, elements, dtype))


def check_averages(client: ronde.Client, stream: software.Stream) -> None:
    for dtype in ("float32", "float64", "float16", "int32", "uint8"):
        total = total_of(client, 9_001, dtype)
        array = software.DeviceArray(contribution(client.rank, 9_001, dtype), stream)
        client.allreduce(array, ronde.Average, out=array)
        if numpy.dtype(dtype).kind == "f":
            # The average of thirds is rounded.
            numpy.testing.assert_allclose(array.read(), total.astype("float64") / client.size, rtol=1e-3)
        else:
            check(array, total // client.size)


def check_large_averages(client: ronde.Client, stream: software.Stream) -> None:
    """Averages of bfloat16 whose sums are too large for the type."""
    large = numpy.full(9_001, 2.0**127, "float32")
    array = Bfloat16Array(ronde.Bfloat16.from_float32(large).bits, stream)
    client.allreduce(array, ronde.Average, out=array)
    numpy.testing.assert_allclose(ronde.Bfloat16(array.read()).to_float32(), large, rtol=2.0**-7)


def check_scales_and_codecs(client: ronde.Client, stream: software.Stream) -> None:
    total = total_of(client, 9_001, "float32")
    # Only the second factor leaves the contributions as they are.
    for before, after in [(1.0, 0.5), (0.5, 1.0), (0.25, 8.0)]:
        array = software.DeviceArray(contribution(client.rank, 9_001, "float32"), stream)
        client.allreduce(array, ronde.Sum, prescale_factor=before, postscale_factor=after, out=array)
        check(array, total * numpy.float32(before * after))
    for codec in ("bfloat16", "float16"):
        array = software.DeviceArray(contribution(client.rank, 9_001, "float32"), stream)
        client.allreduce(array, ronde.Sum, codec=codec, out=array)
        check(array, total)


def check_groups(client: ronde.Client, stream: software.Stream) -> None:
    """Tensors that travel together, one of them without elements and one that a message carries."""
    lengths = [5_003, 0, 70_001, 3, 2_048]
    for _ in range(3):
        arrays = [software.DeviceArray(contribution(client.rank, length, "float64"), stream) for length in lengths]
        client.grouped_allreduce(arrays, ronde.Sum, out=arrays)
        for length, array in zip(lengths, arrays):
            check(array, total_of(client, length, "float64"))


def check_steps(client: ronde.Client, stream: software.Stream) -> None:
    """Steps that repeat, which sidecars perform without negotiation; ranks submit in orders of their own."""
    random = numpy.random.default_rng(client.rank + 100)
    lengths = [1_500, 2_001, 4_096, 9_999]
    sums = [total_of(client, length, "float32") for length in lengths]
    for _ in range(12):
        arrays = [software.DeviceArray(contribution(client.rank, length, "float32"), stream) for length in lengths]
        handles = {}
        for at in random.permutation(len(lengths)):
            handles[at] = client.allreduce_async(arrays[at], ronde.Sum, f"step.{at}", out=arrays[at])
        for at in random.permutation(len(lengths)):
            handles[at].wait()
        for array, total in zip(arrays, sums):
            check(array, total)


def check_sets(client: ronde.Client, stream: software.Stream) -> None:
    """Of one host, with one rank on each host, and with more ranks on one host than on the other."""
    for ranks in ([0, 1], [0, client.size - 1], [0, 1, client.size - 1]):
        each = client.add_process_set(ranks)
        if each.included():
            array = software.DeviceArray(contribution(client.rank, 6_001, "float32"), stream)
            client.allreduce(array, ronde.Sum, out=array, process_set=each)
            check(array, functools.reduce(numpy.add, [contribution(rank, 6_001, "float32") for rank in ranks]))


def check_join(client: ronde.Client, stream: software.Stream) -> None:
    """A rank that has joined contributes zeros: its host copies, the other one need not."""
    every = all_of(client, 6_001, "float32")
    if client.rank:
        array = software.DeviceArray(every[client.rank], stream)
        handle = client.allreduce_async(array, ronde.Sum, "uneven", out=array)
        joined = client.join_async()
        handle.wait()
        joined.wait()
        check(array, functools.reduce(numpy.add, every[1:]))
    else:
        client.join()


def main() -> None:
    client = ronde.connect(operation_timeout=60)
    software.use(client.local_rank)
    stream = software.Stream()
    gpu_shared.check_bfloat16(client, stream, *["two_level_operations"] * 2)
    gpu_shared.check_reductions(client, stream)
    gpu_shared.check_broadcasts(client, stream)
    gpu_shared.check_own_memory(client, client.local_rank)
    gpu_shared.check_order(client, stream)
    gpu_shared.check_mixed(client, stream)
    gpu_shared.check_others(client, stream)
    for each in (
        check_ragged,
        check_averages,
        check_large_averages,
        check_scales_and_codecs,
        check_groups,
        check_steps,
        check_sets,
        check_join,
    ):
        each(client, stream)
        print(each.__name__, flush=True)
    client.barrier()
    if client.local_rank == 0:
        print("gpu", json.dumps(gpu_shared.status()), flush=True)
    client.barrier()
    client.close()
    print("levels hold", flush=True)


if __name__ == "__main__":
    main()
