"""Tensors of any library as address, length, dtype and shape, and results in the caller's own kind.

The native client reads and writes memory by address; this module is the only place that hands addresses out, and it
keeps the tensor behind one alive for as long as the address is used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Callable, Protocol

import numpy

from ronde import _ronde

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

DTYPES = frozenset(_ronde.DTYPES)


class Source:
    """A contiguous tensor in this process's memory, to be read, and how to make a result of the same kind."""

    def __init__(self, owner: Any, address: int, dtype: str, shape: Sequence[int], nbytes: int, empty: Empty) -> None:
        self.owner = owner  # keeps the memory alive
        self.address = address
        self.dtype = check_dtype(dtype)
        self.shape = tuple(shape)
        self.nbytes = nbytes
        self.empty = empty


class Target:
    """Memory that a result is read into; `finish` gives the tensor that the user gets."""

    def __init__(
        self, owner: Any, address: int, dtype: str, shape: Sequence[int], nbytes: int, finish: Callable[[], Any]
    ) -> None:
        self.owner = owner  # keeps the memory alive
        self.address = address
        self.dtype = check_dtype(dtype)
        self.shape = tuple(shape)
        self.nbytes = nbytes
        self.finish = finish


class Empty(Protocol):
    """Makes memory for a result of some shape."""

    def __call__(self, shape: Sequence[int]) -> Target:
        """Memory for a result of this shape."""
        ...


def source_of(tensor: Any) -> Source:
    """Any tensor as a source: PyTorch, NumPy, DLPack, `__array_interface__`, or the buffer protocol."""
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(tensor, torch_module.Tensor):
        return _torch_source(tensor)
    return _numpy_source(_as_array(tensor))


def target_of(tensor: Any) -> Target:
    """A tensor of the user as the place where a result goes. It must be writable."""
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(tensor, torch_module.Tensor):
        return _torch_target(tensor)
    if isinstance(tensor, numpy.ndarray):
        return _numpy_target(tensor)
    raise ValueError(f"a result can be written into a NumPy array or a PyTorch tensor, not into {_kind(tensor)}")


def check_dtype(name: str) -> str:
    """The name, if ronde has such elements."""
    if name not in DTYPES:
        raise ValueError(f"dtype {name} is not supported; ronde has {', '.join(sorted(DTYPES))}")
    return name


def _as_array(tensor: Any) -> numpy.ndarray[Any, Any]:
    if isinstance(tensor, numpy.ndarray):
        return tensor
    try:
        if hasattr(tensor, "__array_interface__"):
            return numpy.asarray(tensor)
        if hasattr(tensor, "__dlpack__"):
            return numpy.from_dlpack(tensor)
        return numpy.asarray(memoryview(tensor))
    except (TypeError, BufferError, RuntimeError) as error:
        raise ValueError(
            f"{_kind(tensor)} is no tensor: give a NumPy array, a PyTorch tensor, or an object in main memory that has "
            f"DLPack or the buffer protocol ({error})"
        ) from error


def _numpy_source(array: numpy.ndarray[Any, Any]) -> Source:
    check_dtype(array.dtype.name)
    # Also turns other byte orders into the machine's.
    dense = numpy.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))

    def empty(shape: Sequence[int]) -> Target:
        return _numpy_target(numpy.empty(shape, dtype=dense.dtype))

    # `ascontiguousarray` makes a scalar one-dimensional, so the shape is the original's.
    return Source(dense, _address(dense), dense.dtype.name, array.shape, dense.nbytes, empty)


def _numpy_target(array: numpy.ndarray[Any, Any]) -> Target:
    if not array.flags.writeable:
        raise ValueError("the array is read-only, so no result can be written into it; give a copy")
    check_dtype(array.dtype.name)
    is_direct = array.flags.c_contiguous and array.dtype.isnative
    dense = array if is_direct else numpy.empty(array.shape, dtype=array.dtype.newbyteorder("="))

    def finish() -> Any:
        if dense is not array:
            array[...] = dense
        return array

    return Target(dense, _address(dense), dense.dtype.name, dense.shape, dense.nbytes, finish)


def _address(array: numpy.ndarray[Any, Any]) -> int:
    # Sized zero, some arrays have an address of no meaning; no byte of it is touched.
    address: int = array.__array_interface__["data"][0]
    return address


def _torch_source(tensor: torch.Tensor) -> Source:
    import torch

    dense = _torch_dense(tensor)
    device = tensor.device

    def empty(shape: Sequence[int]) -> Target:
        result = torch.empty(tuple(shape), dtype=dense.dtype)
        return _torch_memory(result, lambda: result.to(device))

    return Source(dense, dense.data_ptr(), torch_dtype_name(dense.dtype), tensor.shape, _torch_nbytes(dense), empty)


def _torch_target(tensor: torch.Tensor) -> Target:
    import torch

    check_dtype(torch_dtype_name(tensor.dtype))
    _check_dense_layout(tensor)
    if tensor.is_contiguous() and tensor.device.type == "cpu" and not tensor.is_neg():
        return _torch_memory(tensor, lambda: tensor)
    staged = torch.empty(tensor.shape, dtype=tensor.dtype)

    def finish() -> Any:
        with torch.no_grad():
            tensor.copy_(staged)
        return tensor

    return _torch_memory(staged, finish)


def _torch_memory(tensor: torch.Tensor, finish: Callable[[], Any]) -> Target:
    dtype = torch_dtype_name(tensor.dtype)
    return Target(tensor, tensor.data_ptr(), dtype, tensor.shape, _torch_nbytes(tensor), finish)


def _torch_dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in main memory, contiguous, without its history."""
    _check_dense_layout(tensor)
    check_dtype(torch_dtype_name(tensor.dtype))
    dense = tensor.detach()
    if dense.device.type != "cpu":
        dense = dense.cpu()
    return dense.resolve_neg().contiguous()


def _check_dense_layout(tensor: torch.Tensor) -> None:
    import torch

    if tensor.layout != torch.strided:
        raise ValueError(f"tensors of layout {tensor.layout} are not supported; make it dense with to_dense()")


def torch_dtype_name(dtype: torch.dtype) -> str:
    """The name of a PyTorch type as ronde has it."""
    return str(dtype).partition(".")[2]


def _torch_nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _kind(tensor: Any) -> str:
    return f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
