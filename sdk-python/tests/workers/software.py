"""The software device of `tests/device` in this process: memory and streams on it, for workers that test GPUs.

It is loaded by the name of NVIDIA's driver, from LD_LIBRARY_PATH, as the native client loads it.
"""

from __future__ import annotations

import ctypes
import math
import os
import time
from typing import TYPE_CHECKING, Any, Callable

import numpy

if TYPE_CHECKING:
    import ronde

if "SAME_GPU" not in os.environ:
    # Each process sees GPUs of its own, as with CUDA_VISIBLE_DEVICES.
    os.environ.setdefault("RONDE_DEVICE_FIRST", str(8 * int(os.environ.get("RONDE_RANK", "0"))))
_library = ctypes.CDLL("libcuda.so.1")
_library.ronde_device_count.restype = ctypes.c_uint64
_TIMEOUT_S = 20.0


def code(function: str, *arguments: Any) -> int:
    """Calls a function, and returns its code."""
    found: int = getattr(_library, function)(*arguments)
    return found


def call(function: str, *arguments: Any) -> None:
    """Calls a function that returns 0."""
    found = code(function, *arguments)
    assert found == 0, f"{function} returned {found}"


def use(ordinal: int = 0) -> None:
    """Makes a device this thread's current one, as PyTorch's runtime would."""
    call("cuInit", 0)
    context = ctypes.c_size_t()
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
    call("cuCtxPushCurrent_v2", context)


def count(name: str) -> int:
    """Returns a figure of the device."""
    found: int = _library.ronde_device_count(name.encode())
    return found


def fail(function: str, with_code: int, nth: int = 1) -> None:
    """Makes the n-th call of a function fail from now on."""
    _library.ronde_device_fail(function.encode(), with_code, ctypes.c_uint64(nth))


def block(function: str, is_blocked: bool) -> None:
    """Makes calls of a function wait, as those of a driver that is busy do, or lets them go on."""
    _library.ronde_device_block(function.encode(), int(is_blocked))


def heal() -> None:
    """Forgets all failures to come."""
    _library.ronde_device_heal()


def set_copy_delay_us(delay_us: int) -> None:
    """Sets how long each copy takes in addition."""
    _library.ronde_device_set_copy_delay_us(ctypes.c_uint64(delay_us))


def close(client: ronde.Client) -> None:
    """Closes a client when all ranks have come so far: one that closes ends the session of the others."""
    client.barrier()
    client.close()


class Stream:
    """A stream of the caller's."""

    def __init__(self) -> None:
        found = ctypes.c_size_t()
        call("cuStreamCreate", ctypes.byref(found), 1)
        self.handle = found.value

    def hold(self, is_held: bool) -> None:
        """Stops the stream as a long kernel would, or lets it go on."""
        call("ronde_device_hold", ctypes.c_size_t(self.handle), int(is_held))

    def destroy(self) -> None:
        """Destroys it, as another library may at any time."""
        call("cuStreamDestroy_v2", ctypes.c_size_t(self.handle))


class DeviceArray:
    """An array in the memory of the current device, as other libraries have it."""

    def __init__(self, content: numpy.ndarray[Any, Any], stream: Stream | None = None) -> None:
        self.shape, self.dtype, self.nbytes = content.shape, content.dtype, content.nbytes
        self.stream = stream
        self.strides: tuple[int, ...] | None = None
        self.address = 0
        if self.nbytes:
            found = ctypes.c_uint64()
            call("cuMemAlloc_v2", ctypes.byref(found), ctypes.c_size_t(self.nbytes))
            self.address = found.value
            self.write(content)

    def __del__(self) -> None:
        if self.address:
            _library.cuMemFree_v2(ctypes.c_uint64(self.address))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "strides": self.strides,
            "stream": None if self.stream is None else self.stream.handle,
            "version": 3,
        }

    def write(self, content: numpy.ndarray[Any, Any]) -> None:
        """Overwrites it at once, whatever its stream does."""
        dense = numpy.ascontiguousarray(content)
        size = ctypes.c_size_t(dense.nbytes)
        call("cuMemcpyHtoD_v2", ctypes.c_uint64(self.address), ctypes.c_size_t(dense.ctypes.data), size)

    def fill(self, byte: int) -> None:
        """Enqueues a kernel that sets all bytes."""
        assert self.stream is not None
        handle, address = ctypes.c_size_t(self.stream.handle), ctypes.c_uint64(self.address)
        call("ronde_device_fill", handle, address, ctypes.c_uint8(byte), ctypes.c_size_t(self.nbytes))

    def read(self) -> numpy.ndarray[Any, Any]:
        """Waits for its stream, and returns a copy."""
        if self.stream is not None:
            call("cuStreamSynchronize", ctypes.c_size_t(self.stream.handle))
        content = numpy.empty(self.shape, self.dtype)
        if self.nbytes:
            size = ctypes.c_size_t(self.nbytes)
            call("cuMemcpyDtoH_v2", ctypes.c_size_t(content.ctypes.data), ctypes.c_uint64(self.address), size)
        return content


class View(DeviceArray):
    """A part of an array that owns its memory, from a byte on."""

    def __init__(self, whole: Any, offset: int, shape: tuple[int, ...], stream: Stream) -> None:
        interface = whole.__cuda_array_interface__
        self.whole, self.stream, self.strides = whole, stream, None
        self.shape, self.dtype = shape, numpy.dtype(interface["typestr"])
        self.nbytes = self.dtype.itemsize * math.prod(shape)
        self.address = interface["data"][0] + offset

    def __del__(self) -> None:
        """The memory is that of the whole."""


def eventually(what: str, condition: Callable[[], bool]) -> None:
    """Polls until a condition holds."""
    until = time.monotonic() + _TIMEOUT_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.002)
