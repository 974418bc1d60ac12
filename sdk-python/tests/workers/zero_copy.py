"""Run by every rank, with an arena of 16 MiB: tensors in shared memory that are submitted without a copy."""

from __future__ import annotations

import os

import numpy

import ronde

ARENA_BYTES = 16 << 20
ELEMENTS = (5 << 20) // 4  # two do not fit beside two copies
IS_MAPPED = os.environ.get("RONDE_MAPPED") != "0"


def used(client: ronde.Client) -> int:
    return client.shared_memory.in_use_bytes


def refused(client: ronde.Client, shape: object, dtype: object = "float32") -> str:
    """Why there is no such array."""
    try:
        client.empty(shape, dtype)  # type: ignore[arg-type]
    except (ValueError, TypeError, ronde.RefusedError) as error:
        return str(error)
    raise AssertionError(f"{shape} {dtype}")


def check_arrays(client: ronde.Client) -> None:
    """Shapes, types, lifetimes, and what cannot be."""
    for dtype in ("uint8", "int16", "float16", "float64", "bool", numpy.int32):
        array = client.empty((3, 5), dtype)
        assert (array.shape, array.dtype) == ((3, 5), numpy.dtype(dtype))
        array[...] = 1
        numpy.testing.assert_array_equal(client.allreduce(array, ronde.Max), numpy.ones((3, 5), dtype))
    bits = client.empty(4, "bfloat16")
    assert isinstance(bits, ronde.Bfloat16)
    bits.bits[:] = ronde.Bfloat16.from_float32([1, 2, 3, 4]).bits
    assert client.allreduce(bits, ronde.Sum).to_float32()[3] == 4 * client.size
    assert client.empty((0, 7)).shape == (0, 7)
    assert client.empty(()).shape == ()
    del array, bits
    assert used(client) == 0, client.shared_memory
    assert "complex64 is not supported" in refused(client, 3, "complex64")
    assert "no type of elements" in refused(client, 3, "flaot32")
    assert "dimensions are integers from 0" in refused(client, (3, -1))
    assert "arena" in refused(client, ARENA_BYTES), refused(client, ARENA_BYTES)
    assert used(client) == 0


def check_nothing_is_copied(client: ronde.Client) -> None:
    """A submission from shared memory, also of a part, uses no second slot; other submissions do."""
    whole = client.empty(ELEMENTS)
    whole[:] = numpy.arange(ELEMENTS) % 1_000 + client.rank
    others = sum(range(client.size))
    held = used(client)
    last = client.size - 1
    for tensor in (whole, whole[3:50_000], whole[:-1].reshape(-1, 1)):
        want = (tensor - numpy.float32(client.rank)) * client.size + others
        if client.rank == 0 and last > 0:
            # It submits after the last rank has checked, so that the operation is certainly in flight then.
            client.recv(last, tag=1)
        handle = client.allreduce_async(tensor, ronde.Sum, name="zero-copy")
        if client.rank == last:
            taken = used(client) - held
            assert taken <= (1.25 * tensor.nbytes + 256 if IS_MAPPED else 0), (taken, tensor.nbytes)
        if client.rank == last > 0:
            client.send(numpy.zeros(1), 0, tag=1)
        numpy.testing.assert_array_equal(handle.wait(), want)
        del handle
        assert used(client) == held
    numpy.testing.assert_array_equal(client.allreduce(whole[::2], ronde.Min), whole[::2] - client.rank)
    client.barrier()


def check_it_is_held_while_it_is_read(client: ronde.Client) -> None:
    """The last view may be dropped before the operation completes; its memory is not reused until then."""
    array = client.empty(100_000)
    array[:] = client.rank
    handle = client.allreduce_async(array, ronde.Sum, name="held")
    del array
    other = client.empty(100_000)
    other[:] = -1
    numpy.testing.assert_array_equal(handle.wait(), numpy.full(100_000, sum(range(client.size)), "float32"))
    del other, handle
    client.barrier()
    assert used(client) == 0, client.shared_memory


def check_results_in_place(client: ronde.Client) -> None:
    """The result may overwrite the input, in groups as well."""
    arrays = [client.empty((40, 1_000)) for _ in range(3)]
    for step in range(20):
        for index, array in enumerate(arrays):
            array[...] = client.rank + index + step
        results = client.grouped_allreduce(arrays, ronde.Sum, out=arrays)
        for index, result in enumerate(results):
            assert result is arrays[index]
            assert (result == sum(range(client.size)) + (index + step) * client.size).all()
        gathered = client.allgather(arrays[0][:1])
        assert gathered.shape == (client.size, 1_000)


with ronde.connect() as client:
    check_arrays(client)
    check_nothing_is_copied(client)
    check_it_is_held_while_it_is_read(client)
    check_results_in_place(client)
    last = client.empty(1_000)
    last[:] = 7
    client.barrier()  # a rank that closes ends the session of the others
assert (last == 7).all()  # also when the client is closed
print("nothing is copied")
