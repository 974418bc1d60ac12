"""Run by two ranks on a software device: what is ordered, what is not waited for, and what failures do."""

from __future__ import annotations

import os
import sys

import numpy
import software

import ronde

ELEMENTS = 100_000


def ones(stream: software.Stream) -> software.DeviceArray:
    return software.DeviceArray(numpy.ones(ELEMENTS, "uint8"), stream)


def check_order(client: ronde.Client, stream: software.Stream) -> None:
    """The copy comes after the kernels before the call, and the call does not wait for them."""
    array = ones(stream)
    before = software.count("stream_synchronizations")
    stream.hold(True)
    array.fill(3)
    handle = client.allreduce_async(array, ronde.Sum, "ordered", out=array)
    assert not handle.poll(), "the kernel has not run"
    stream.hold(False)
    handle.wait()
    assert software.count("stream_synchronizations") == before, "the host waited for no stream"
    assert (array.read() == 3 * client.size).all()


def check_wait(client: ronde.Client, stream: software.Stream) -> None:
    """A kernel after the wait comes after the copy of the result, for which the host does not wait."""
    array = ones(stream)
    handle = client.allreduce_async(array, ronde.Sum, "waited", out=array)
    software.set_copy_delay_us(100_000)
    handle.wait()
    array.fill(9)
    assert (array.read() == 9).all()
    software.set_copy_delay_us(0)


def check_unordered_names(client: ronde.Client, stream: software.Stream) -> None:
    """Ranks submit two names in another order, and wait for the first one first."""
    first, second = ones(stream), ones(stream)
    names = [("a", first), ("b", second)]
    handles = {
        name: client.allreduce_async(array, ronde.Sum, name, out=array)
        for name, array in (names if client.rank else reversed(names))
    }
    for name, array in names:
        handles[name].wait()
        assert (array.read() == client.size).all()


def check_drop(client: ronde.Client, stream: software.Stream) -> None:
    """A handle that is dropped before the input has arrived fails the operation on the other ranks at once."""
    array = ones(stream)
    if client.rank == 1:
        stream.hold(True)
        handle = client.allreduce_async(array, ronde.Sum, "dropped", out=array)
        del handle
    else:
        handle = client.allreduce_async(array, ronde.Sum, "dropped", out=array)
        try:
            handle.wait(20)
        except ronde.RondeError as error:
            assert "dropped" in str(error), error
        else:
            raise AssertionError("rank 1 takes no part")
    client.barrier()
    stream.hold(False)


def check_failed_copy(client: ronde.Client, stream: software.Stream) -> None:
    """A copy from the device that fails on one rank fails the operation on all of them, with the reason."""
    array = ones(stream)
    if client.rank == 1:
        software.fail("cuMemcpyDtoHAsync_v2", 999)
    try:
        client.allreduce(array, ronde.Sum, "broken", out=array)
    except ronde.RondeError as error:
        assert "CUDA_ERROR_UNKNOWN" in str(error), error
        assert client.rank != 1 or error.cause == "device", error.cause
    else:
        raise AssertionError("the copy of rank 1 failed")
    client.barrier()
    client.allreduce(array, ronde.Sum, "whole", out=array)
    assert (array.read() == client.size).all()


def check_refused_copy(client: ronde.Client, stream: software.Stream) -> None:
    """A copy from the device that cannot begin fails the operation on all ranks, with the reason."""
    array = ones(stream)
    if client.rank == 1:
        software.fail("cuPointerGetAttribute", 999, 9)  # the first check of the copy; eight are made before
    try:
        client.allreduce(array, ronde.Sum, "refused", out=array)
    except ronde.RondeError as error:
        assert "CUDA_ERROR_UNKNOWN" in str(error), error
    else:
        raise AssertionError("the copy of rank 1 was refused")
    client.barrier()


def check_other_stream(client: ronde.Client, stream: software.Stream) -> None:
    """A result is ordered with the stream of its target: the input is in main memory, or on another stream or GPU."""
    target_stream = software.Stream()
    for source in (numpy.ones(ELEMENTS, "uint8"), ones(stream)):
        target = ones(target_stream)
        target_stream.hold(True)
        target.fill(9)
        handle = client.allreduce_async(source, ronde.Sum, out=target)
        handle.wait()
        target_stream.hold(False)
        assert (target.read() == client.size).all()
    software.use(1)
    there = software.Stream()
    target = ones(there)
    there.hold(True)
    target.fill(9)
    client.allreduce(ones_of(0, stream), ronde.Sum, out=target)
    software.use(1)
    there.hold(False)
    assert (target.read() == client.size).all()
    del target
    software.use(0)


def ones_of(ordinal: int, stream: software.Stream) -> software.DeviceArray:
    """Ones on a GPU."""
    software.use(ordinal)
    return ones(stream)


def check_stream_that_ends(client: ronde.Client) -> None:
    """The stream of the submission may be destroyed before the wait, as those of CuPy and Numba."""
    first, second = software.Stream(), software.Stream()
    array = ones(first)
    handle = client.allreduce_async(array, ronde.Sum, out=array)
    software.eventually("the result is there", handle.poll)
    first.destroy()
    array.stream = second
    handle.wait()
    assert (array.read() == client.size).all()


def check_messages(client: ronde.Client, stream: software.Stream) -> None:
    """A message does not overtake an earlier one whose tensor is on its way from the GPU."""
    if client.rank == 1:
        stream.hold(True)
        handles = [client.send_async(ones(stream), 0, 5), client.send_async(numpy.full(3, 2, "uint8"), 0, 5)]
        client.barrier()
        stream.hold(False)
        for handle in handles:
            handle.wait()
    else:
        client.barrier()
        assert [int(client.recv(None, 5)[0]) for _ in range(2)] == [1, 2]


def check_join(client: ronde.Client, stream: software.Stream) -> None:
    """A join comes after operations whose tensor is on its way from the GPU."""
    array = ones(stream)
    if client.rank == 1:
        stream.hold(True)
    handle = client.allreduce_async(array, ronde.Sum, "last", out=array)
    joined = client.join_async()
    if client.rank == 1:
        stream.hold(False)
    handle.wait()
    joined.wait()
    assert (array.read() == client.size).all()


def check_failed_result(client: ronde.Client, stream: software.Stream) -> None:
    """A copy to the device that cannot be started is an error of its own rank."""
    array = ones(stream)
    if client.rank == 1:
        software.fail("cuMemcpyHtoDAsync_v2", 2)
    try:
        client.allreduce(array, ronde.Sum, "unread", out=array)
    except ronde.RondeError as error:
        assert client.rank == 1, error
        assert error.cause == "device", error
        assert "out of memory" in str(error), error
    else:
        assert client.rank != 1
    client.barrier()


def main() -> None:
    client = ronde.connect(operation_timeout=60)
    software.use()
    stream = software.Stream()
    check_order(client, stream)
    check_wait(client, stream)
    check_unordered_names(client, stream)
    check_drop(client, stream)
    if os.environ.get("RONDE_GPU_LEVELS", "1") == "1":  # with two levels there are none of these copies
        check_failed_copy(client, stream)
        check_refused_copy(client, stream)
        check_failed_result(client, stream)
    check_other_stream(client, stream)
    check_stream_that_ends(client)
    check_messages(client, stream)
    check_join(client, stream)
    client.barrier()  # a rank that closes ends the session of the others
    software.eventually("slots are released", lambda: client.shared_memory.slots == 0)
    client.close()
    print("order holds")


if __name__ == "__main__":
    sys.exit(main())
