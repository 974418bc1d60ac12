"""Run by one rank on a software device: what is refused, and that nothing is in flight afterwards."""

from __future__ import annotations

import numpy
import software

import ronde
from ronde import _ronde


def refused(client: ronde.Client, array: object, out: object = None) -> Exception:
    try:
        client.allreduce(array, ronde.Sum, out=out)
    except (ValueError, ronde.RondeError) as error:
        return error
    raise AssertionError("it was accepted")


def check_arrays(client: ronde.Client) -> None:
    array = software.DeviceArray(numpy.ones((4, 6), "float32"))
    array.strides = (4, 16)
    error = refused(client, array, array)
    assert isinstance(error, ValueError), error
    assert "not contiguous, its strides are (4, 16)" in str(error), error
    array.strides = (24, 4)
    assert client.allreduce(array, ronde.Sum, out=array) is array
    error = refused(client, array)
    assert isinstance(error, ValueError), error
    assert "give out=" in str(error), error
    other = software.DeviceArray(numpy.ones((4, 5), "float32"))
    error = refused(client, array, other)
    assert isinstance(error, ValueError), error
    assert "out is of type float32 and shape (4, 5)" in str(error), error
    dates = software.DeviceArray(numpy.zeros(3, "complex64"))
    assert "dtype complex64 is not supported" in str(refused(client, dates, dates))
    host = software.DeviceArray(numpy.ones(3, "float32"))
    address, host.address = host.address, numpy.ones(100).ctypes.data
    error = refused(client, host, host)
    assert isinstance(error, ValueError), error
    assert "no GPU has memory at" in str(error), error
    host.address = address


def check_devices(client: ronde.Client) -> None:
    """Tensors of two devices in one operation: each is copied by its own device's streams."""
    here = software.DeviceArray(numpy.full(1000, 2.0))
    software.use(1)
    there = software.DeviceArray(numpy.zeros(1000))
    assert client.allreduce(here, ronde.Sum, out=there) is there
    assert (there.read() == 2.0).all()
    del there
    # A tensor that is given as one of another device.
    error = refused_place(client, here, 1)
    assert isinstance(error, ValueError), error
    assert "is on GPU 0, but the tensor was given as one on GPU 1" in str(error), error
    error = refused_place(client, here, 7)
    assert isinstance(error, ValueError), error
    assert "there is no GPU 7" in str(error), error
    software.use(0)


def refused_place(client: ronde.Client, array: software.DeviceArray, ordinal: int) -> Exception:
    """The refusal of an array that is given as one of another GPU than that of its memory."""
    before = _ronde.gpu_of
    _ronde.gpu_of = lambda address: ordinal
    try:
        return refused(client, array, array)
    finally:
        _ronde.gpu_of = before


def check_memory(client: ronde.Client) -> None:
    """Out of memory: of the device for a stream, and of the system for page-locked memory."""
    array = software.DeviceArray(numpy.ones(10))
    software.fail("cuMemHostRegister_v2", 2)
    big = software.DeviceArray(numpy.ones(3 << 20))  # needs another segment
    error = refused(client, big, big)
    assert isinstance(error, ronde.RondeError), error
    assert error.cause == "device", error
    assert "out of memory: cuMemHostRegister" in str(error), error
    assert client.allreduce(big, ronde.Sum, out=big) is big
    software.fail("cuEventCreate", 2)
    error = refused(client, array, array)
    assert "out of memory: cuEventCreate" in str(error), error
    assert client.allreduce(array, ronde.Sum, out=array) is array


def main() -> None:
    client = ronde.connect()
    software.use()
    check_arrays(client)
    check_devices(client)
    check_memory(client)
    software.eventually("slots are released", lambda: client.shared_memory.slots == 0)
    client.close()
    print("refusals hold")


if __name__ == "__main__":
    main()
