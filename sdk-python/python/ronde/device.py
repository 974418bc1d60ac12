"""Tensors on GPUs: where they are, for the native client, and how results get there.

The native client copies between a GPU and shared memory on streams of its own. This module names a tensor's memory and
the stream that computes it, and orders the caller's stream after the copy of a result. The host waits for no stream.

Two kinds of tensors have such memory: PyTorch's on a CUDA device, and objects with `__cuda_array_interface__`, such as
arrays of CuPy and Numba.
"""

from __future__ import annotations

import functools
import math
import os
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import numpy

from ronde import _ronde

if TYPE_CHECKING:
    import torch

    from ronde.tensors import Target

# The version of the interface that has a stream.
_INTERFACE_VERSION = 3
_LEGACY_STREAM = 0


class Place(NamedTuple):
    """Where memory on a GPU is.

    ordinal -- the GPU's number
    stream  -- the handle of the stream that computes what is there, and that uses a result
    owner   -- keeps the memory alive
    is_waited -- whether the host waits for the copy of a result, because there is no stream to order
    """

    ordinal: int
    stream: int
    owner: Any
    is_waited: bool = False


class Array(NamedTuple):
    """What an object with `__cuda_array_interface__` describes."""

    place: Place
    address: int
    dtype: numpy.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    is_writable: bool


def array_of(owner: Any) -> Array:
    """Reads `__cuda_array_interface__`.

    Raises ValueError for an array that is not contiguous, has a mask, or is of a version without streams; RondeError
    with the cause "device" without a GPU or its driver.
    """
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
    ordinal = _ronde.gpu_of(address) if nbytes else 0
    place = Place(ordinal, _LEGACY_STREAM if stream is None else int(stream), owner, stream is None)
    return Array(place, address, dtype, shape, nbytes, not is_read_only)


def _dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def place_of(tensor: torch.Tensor) -> Place:
    """Returns where a PyTorch tensor on a GPU is, with the current stream of this thread."""
    import torch

    device = tensor.device
    return Place(tensor.get_device(), torch.cuda.current_stream(device).cuda_stream, tensor.detach())


@functools.cache
def is_copied_by_torch() -> bool:
    """Returns whether PyTorch copies tensors on its GPUs, and the host waits for the copies.

    It does on GPUs of AMD, of which the native client knows nothing, and with RONDE_GPU_STAGING=torch. Raises
    ValueError for another value of that variable than "ronde" and "torch".
    """
    import torch

    chosen = os.environ.get("RONDE_GPU_STAGING", "ronde")
    if chosen not in ("ronde", "torch"):
        raise ValueError(f'RONDE_GPU_STAGING is {chosen!r}; set it to "ronde" or "torch"')
    return chosen == "torch" or torch.version.hip is not None


def deliver(operation: _ronde.Operation, target: Target, place: Place) -> None:
    """Starts to copy a result to a GPU, and orders the current stream after the copy."""
    arrival = operation.deliver(place, target.address, target.nbytes, at_submission=not target.is_new)
    if place.is_waited:
        arrival.synchronize()
    else:
        arrival.order(_current_stream(place))


def _current_stream(place: Place) -> int:
    """Returns the stream that uses a result: for PyTorch the reading thread's current one."""
    import sys

    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(place.owner, torch_module.Tensor):
        stream: int = torch_module.cuda.current_stream(place.owner.device).cuda_stream
        return stream
    return place.stream


def through_host(target: Target, place: Place, read: Callable[[int, int], None]) -> None:
    """Reads a result that the native client does not deliver, and lets PyTorch copy it to the GPU."""
    from ronde import staging

    tensor = _torch_tensor(place)
    lease = staging.for_device(tensor.shape, tensor.dtype)
    read(lease.tensor.data_ptr(), target.nbytes)
    staging.to_device(lease, tensor)


def copied_to_host(place: Place) -> Any:
    """Returns a copy of a tensor in main memory, for operations that may be performed again. Waits for it.

    Raises ValueError for arrays of other libraries than PyTorch.
    """
    from ronde import staging

    return staging.from_device(_torch_tensor(place))


def _torch_tensor(place: Place) -> torch.Tensor:
    import torch

    if not isinstance(place.owner, torch.Tensor):
        raise ValueError(
            'with on_failure="continue" tensors on GPUs are PyTorch\'s; give one, or connect with on_failure="raise"'
        )
    return place.owner
