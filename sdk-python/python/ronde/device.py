"""Tensors on GPUs: where they are, for the native client, and how results get there.

The native client copies between a GPU and shared memory on its own streams. This module names a tensor's memory and
the stream that computes it, and orders the caller's stream after the copy of a result. The host waits for no stream.

Two kinds of tensors have such memory: PyTorch's on a CUDA device, and objects with `__cuda_array_interface__`, such as
arrays of CuPy and Numba.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import os
import sys
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import numpy

from ronde import _ronde

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from ronde.tensors import Target

# The version of the interface that has a stream.
_INTERFACE_VERSION = 3
_LEGACY_STREAM = 0
# As the interface names it: 0 is not allowed there.
_LEGACY_STREAM_NUMBER = 1

_log = logging.getLogger("ronde")
# An empty array has no address, by which its GPU could be found. It counts as one of the GPU of the array before it.
_latest = {"ordinal": 0}


class DevicePlace(NamedTuple):
    """Where memory on a GPU is.

    ordinal -- the GPU's number
    stream  -- the handle of the stream that computes what is there now. PyTorch's streams last as long as the program;
               for other libraries the handle is used for the submission, and read again for the result
    owner   -- keeps the memory alive
    is_waited -- whether the host waits for the copy of a result, because there is no stream to order
    """

    ordinal: int
    stream: int
    owner: Any
    is_waited: bool = False


class Array(NamedTuple):
    """What an object with `__cuda_array_interface__` describes."""

    place: DevicePlace
    address: int
    dtype: numpy.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    is_writable: bool


class GpuArray:
    """An uninitialized array in memory of a GPU that a session can share with its sidecar.

    It has `__cuda_array_interface__`, so CuPy, Numba and PyTorch view it without a copy (`cupy.asarray(array)`). Its
    memory is freed with the last reference to it; memory that the sidecar has got stays allocated until the session
    ends. The stream of the interface is the legacy default stream, which is ordered with the blocking streams of other
    libraries.

    shape   -- the dimensions, or the length of a vector
    dtype   -- a name or a NumPy type; not bfloat16, which the interface lacks
    ordinal -- the number of the GPU

    Raises ValueError for another type or an invalid shape; RondeError with the cause "device" without a GPU, or if it
    has no memory left.
    """

    def __init__(self, shape: int | Sequence[int], dtype: Any, ordinal: int) -> None:
        self._address = 0
        try:
            self.dtype = numpy.dtype(dtype)
        except TypeError as error:
            raise ValueError(f"{dtype!r} is no type that an array on a GPU can have: {error}") from None
        sizes = (shape,) if isinstance(shape, int) else shape
        self.shape = tuple(operator.index(size) for size in sizes)
        if any(size < 0 for size in self.shape):
            raise ValueError(f"dimensions are integers from 0, not {self.shape}")
        self.ordinal = ordinal
        self.nbytes = self.dtype.itemsize * math.prod(self.shape)
        if self.nbytes:
            self._address = _ronde.gpu_allocate(ordinal, self.nbytes)

    def __del__(self) -> None:
        if self._address:
            _ronde.gpu_free(self._address)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._address, False),
            "strides": None,
            "stream": _LEGACY_STREAM_NUMBER,
            "version": _INTERFACE_VERSION,
        }


def has_interface(owner: Any) -> bool:
    """Returns whether an object has `__cuda_array_interface__`.

    An object whose attribute cannot be read, for example because it is in main memory, has none: its other protocols
    are tried.
    """
    try:
        return getattr(owner, "__cuda_array_interface__", None) is not None
    except Exception as error:
        _log.debug("the __cuda_array_interface__ of a %s cannot be read: %r", type(owner).__qualname__, error)
        return False


def array_of(owner: Any) -> Array:
    """Reads `__cuda_array_interface__`.

    Raises ValueError for an array that is not contiguous, has a mask, or is of a version without streams, and without
    RONDE_GPU_STAGING=ronde; RondeError with the cause "device" without a GPU or its driver.
    """
    if staging_choice() != "ronde":
        raise ValueError(
            "arrays on GPUs of other libraries than PyTorch are copied by ronde itself, which has not been run on a "
            "GPU; set RONDE_GPU_STAGING=ronde to use it all the same, or give a copy in main memory (docs/GPU.md)"
        )
    interface = owner.__cuda_array_interface__
    if interface.get("version", 0) < _INTERFACE_VERSION:
        raise ValueError(
            f"the array's __cuda_array_interface__ is of version {interface.get('version')}; ronde needs 3"
        )
    if interface.get("mask") is not None:
        raise ValueError("arrays with a mask are not supported; give one without")
    dtype, shape = numpy.dtype(interface["typestr"]), tuple(interface["shape"])
    if not dtype.isnative:
        raise ValueError(f"the array on the GPU has elements of another byte order, {dtype}; convert it first")
    strides = interface.get("strides")
    nbytes = dtype.itemsize * math.prod(shape)
    if nbytes and strides is not None and tuple(strides) != _dense_strides(shape, dtype.itemsize):
        raise ValueError(
            f"the array of shape {shape} on the GPU is not contiguous, its strides are {tuple(strides)}; give a "
            "contiguous copy"
        )
    address, is_read_only = interface["data"]
    stream = interface.get("stream")
    if nbytes:
        _latest["ordinal"] = _ronde.gpu_of(address)
    place = DevicePlace(_latest["ordinal"], _LEGACY_STREAM if stream is None else int(stream), owner, stream is None)
    return Array(place, address, dtype, shape, nbytes, not is_read_only)


def _dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def place_of(tensor: torch.Tensor) -> DevicePlace:
    """Returns where a PyTorch tensor on a GPU is, with the current stream of this thread."""
    import torch

    device = tensor.device
    return DevicePlace(tensor.get_device(), torch.cuda.current_stream(device).cuda_stream, tensor.detach())


@functools.cache
def staging_choice() -> str:
    """Returns the value of RONDE_GPU_STAGING: "torch", the default, or "ronde". Raises ValueError for another one."""
    chosen = os.environ.get("RONDE_GPU_STAGING", "torch")
    if chosen not in ("ronde", "torch"):
        raise ValueError(f'RONDE_GPU_STAGING is {chosen!r}; set it to "ronde" or "torch"')
    levels = levels_choice()
    if levels != "1" and chosen != "ronde":
        raise ValueError(f"RONDE_GPU_LEVELS={levels} needs RONDE_GPU_STAGING=ronde; set both, or neither")
    return chosen


def levels_choice() -> str:
    """Returns the value of RONDE_GPU_LEVELS: "1", the default, "2" or "auto". The native client refuses another one."""
    return os.environ.get("RONDE_GPU_LEVELS", "1")


@functools.cache
def is_copied_by_torch() -> bool:
    """Returns whether PyTorch copies tensors on its GPUs, and the host waits for the copies.

    It does unless RONDE_GPU_STAGING=ronde, and always on GPUs of AMD, of which the native client knows nothing. Raises
    ValueError for another value of that variable than "ronde" and "torch".
    """
    import torch

    return staging_choice() == "torch" or torch.version.hip is not None


def deliver(operation: _ronde.Operation, target: Target, place: DevicePlace) -> None:
    """Starts to copy a result to a GPU, and orders the stream that uses it after the copy."""
    tensor = _as_torch_tensor(place.owner)
    if tensor is not None:
        arrival = operation.deliver(place, target.address, target.nbytes, at_submission=not target.is_new)
        arrival.order(_current_stream(tensor))
        return
    # Its library may have destroyed the stream of the submission meanwhile.
    place = array_of(place.owner).place._replace(ordinal=place.ordinal)
    arrival = operation.deliver(place, target.address, target.nbytes)
    if place.is_waited:
        arrival.synchronize()
    else:
        arrival.order(place.stream)


def _current_stream(tensor: torch.Tensor) -> int:
    """Returns this thread's current stream on the GPU of a tensor."""
    import torch

    stream: int = torch.cuda.current_stream(tensor.device).cuda_stream
    return stream


def _as_torch_tensor(owner: Any) -> torch.Tensor | None:
    """Returns a tensor of PyTorch, and None for an object of another library."""
    torch_module = sys.modules.get("torch")
    return owner if torch_module is not None and isinstance(owner, torch_module.Tensor) else None


def through_host(target: Target, place: DevicePlace, read: Callable[[int, int], None]) -> None:
    """Reads a result that the native client does not deliver, and lets PyTorch copy it to the GPU."""
    from ronde import staging

    tensor = _torch_tensor(place)
    lease = staging.for_device(tensor.shape, tensor.dtype)
    read(lease.tensor.data_ptr(), target.nbytes)
    staging.to_device(lease, tensor)


def copied_to_host(place: DevicePlace) -> Any:
    """Returns a copy of a tensor in main memory, which PyTorch makes. Waits for it.

    Operations that may be performed again need one, and sessions that send tensors inside messages.

    Raises ValueError for arrays of other libraries than PyTorch.
    """
    from ronde import staging

    return staging.from_device(_torch_tensor(place))


def _torch_tensor(place: DevicePlace) -> torch.Tensor:
    tensor = _as_torch_tensor(place.owner)
    if tensor is None:
        raise ValueError(
            'with on_failure="continue" or inline, tensors on GPUs are PyTorch\'s, which copies them; give one, or '
            "connect without these options"
        )
    return tensor
