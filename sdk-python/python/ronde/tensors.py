"""Tensors of any library as address, length, dtype and shape, and results in the caller's own kind.

The native client reads and writes memory by address; this module is the only place that hands addresses out, and it
keeps the tensor behind one alive for as long as the address is used.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from typing import TYPE_CHECKING, Any, Callable, Protocol

import numpy

from ronde import _ronde

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

DTYPES = frozenset(_ronde.DTYPES)


class Source:
    """A contiguous tensor in this process's memory, to be read, and how to make a result of the same kind.

    is_writable -- whether `owner` is the user's tensor itself, and a result may be written there
    """

    def __init__(
        self,
        owner: Any,
        address: int,
        dtype: str,
        shape: Sequence[int],
        nbytes: int,
        empty: Empty,
        view: View | None = None,
        is_writable: bool = False,
    ) -> None:
        self.owner = owner  # keeps the memory alive
        self.is_writable = is_writable
        self.address = address
        self.dtype = check_dtype(dtype)
        self.shape = tuple(shape)
        self.nbytes = nbytes
        self.empty = empty
        self.view = view  # None where results are copied in any case


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


class View(Protocol):
    """Makes a tensor that views a result in shared memory, whose owner it keeps."""

    def __call__(self, memory: _ronde.Memory, shape: Sequence[int]) -> Any:
        """A tensor of this shape."""
        ...


class Bfloat16:
    """A tensor of bfloat16 for programs without PyTorch: a NumPy array of its elements' bits.

    bits -- a uint16 array; each element is the upper half of the float32 of the same value

    Raises ValueError for anything else. Where tensors are taken, one of these is, and the results are of its kind.
    """

    def __init__(self, bits: numpy.ndarray[Any, Any]) -> None:
        if not isinstance(bits, numpy.ndarray) or bits.dtype != numpy.uint16:
            raise ValueError(f"the bits of bfloat16 are a NumPy array of uint16, not {_kind(bits)}")
        self.bits = bits

    @classmethod
    def from_float32(cls, values: Any) -> Bfloat16:
        """The nearest bfloat16 numbers of an array, ties to even; NaN becomes the quiet one."""
        array = numpy.asarray(values, dtype=numpy.float32)
        wide = array.view(numpy.uint32)
        rounded = (wide + (numpy.uint32(0x7FFF) + (wide >> 16 & 1)) >> 16).astype(numpy.uint16)
        return cls(numpy.where(numpy.isnan(array), numpy.uint16(0x7FC0), rounded))

    def to_float32(self) -> numpy.ndarray[Any, Any]:
        """The values, exactly."""
        return (self.bits.astype(numpy.uint32) << 16).view(numpy.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        """The dimensions, outermost first."""
        return tuple(self.bits.shape)

    def __repr__(self) -> str:
        return f"Bfloat16({self.to_float32()})"


def source_of(tensor: Any) -> Source:
    """Any tensor as a source: PyTorch, NumPy, DLPack, `__array_interface__`, or the buffer protocol."""
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(tensor, torch_module.Tensor):
        return _torch_source(tensor)
    if isinstance(tensor, Bfloat16):
        return _bfloat16_source(tensor)
    return _numpy_source(_as_array(tensor))


def target_of(tensor: Any) -> Target:
    """A tensor of the user as the place where a result goes. It must be writable."""
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(tensor, torch_module.Tensor):
        return _torch_target(tensor)
    if isinstance(tensor, numpy.ndarray):
        return _numpy_target(tensor)
    if isinstance(tensor, Bfloat16):
        return _bfloat16_target(tensor)
    raise ValueError(f"a result can be written into a NumPy array or a PyTorch tensor, not into {_kind(tensor)}")


def target_like(out: Any, source: Source) -> Target | None:
    """The place for a result like the source, if one is given."""
    if out is None:
        return None
    if out is source.owner and source.is_writable:
        # The memory stays, also when a tensor of PyTorch is given other memory meanwhile.
        owner = out if isinstance(out, numpy.ndarray) else out.detach()
        return Target(owner, source.address, source.dtype, source.shape, source.nbytes, lambda: out)
    return check_target(target_of(out), source, source.shape)


def check_target(target: Target, source: Source, shape: tuple[int | None, ...]) -> Target:
    """The place, once it is known that a result of the source's type and of this shape fits."""
    if (target.dtype, target.shape) != (source.dtype, shape):
        raise ValueError(
            f"out is of type {target.dtype} and shape {target.shape}, but the result will be of type "
            f"{source.dtype} and shape {shape}"
        )
    return target


def owns_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in rows in main memory that no larger tensor has a part in."""
    import torch

    is_plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous()
    return is_plain and not tensor.is_neg() and tensor.untyped_storage().nbytes() == tensor.nbytes


def kind_of(like: Any) -> Callable[[str, Sequence[int]], Target]:
    """Makes memory for results whose type and shape another rank chose: PyTorch's when `like` is its, else NumPy's."""
    torch_module = sys.modules.get("torch")
    if torch_module is None or not isinstance(like, torch_module.Tensor):
        return _numpy_empty
    device = like.device

    def empty(dtype: str, shape: Sequence[int]) -> Target:
        result = torch_module.empty(tuple(shape), dtype=getattr(torch_module, dtype))
        return _torch_memory(result, lambda: result.to(device))

    return empty


def viewer_of(dtype: Any, shape: int | Sequence[int]) -> tuple[int, Callable[[_ronde.Memory], Any]]:
    """How many bytes a tensor has, and what makes one that views so much shared memory.

    dtype -- PyTorch's for its tensors; else by name or as NumPy has it, for NumPy's

    Raises ValueError for a type that ronde does not have, and for what is no shape.
    """
    torch_module = sys.modules.get("torch")
    is_torch = torch_module is not None and isinstance(dtype, torch_module.dtype)
    name = check_dtype(torch_dtype_name(dtype) if is_torch else _numpy_dtype_name(dtype))
    sizes = (shape,) if isinstance(shape, int) else tuple(operator.index(size) for size in shape)
    if any(size < 0 for size in sizes):
        raise ValueError(f"dimensions are integers from 0, not {sizes}")

    def view(memory: _ronde.Memory) -> Any:
        if is_torch:
            return _torch_view(dtype, memory, sizes)
        if name == "bfloat16":
            return Bfloat16(_numpy_view(numpy.uint16, memory, sizes))
        return _numpy_view(numpy.dtype(name), memory, sizes)

    size = numpy.dtype("uint16" if name == "bfloat16" else name).itemsize
    return size * math.prod(sizes), view


def _numpy_dtype_name(dtype: Any) -> str:
    """NumPy has no bfloat16."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        return dtype
    try:
        return str(numpy.dtype(dtype).name)
    except TypeError as error:
        raise ValueError(f"{dtype!r} is no type of elements: {error}") from error


def integers_like(like: Any, values: Sequence[int]) -> Any:
    """Numbers as int32 of the kind of a tensor: PyTorch in main memory, else NumPy."""
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(like, torch_module.Tensor):
        return torch_module.tensor(values, dtype=torch_module.int32)
    return numpy.array(values, dtype=numpy.int32)


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
    dtype = array.dtype.newbyteorder("=")
    dense = numpy.ascontiguousarray(array, dtype=dtype)

    def empty(shape: Sequence[int]) -> Target:
        return _numpy_target(numpy.empty(shape, dtype=dtype))

    view = functools.partial(_numpy_view, dtype)
    is_writable = dense is array and array.flags.writeable
    # `ascontiguousarray` makes a scalar one-dimensional, so the shape is the original's.
    return Source(dense, _address(dense), dense.dtype.name, array.shape, dense.nbytes, empty, view, is_writable)


def _numpy_view(dtype: Any, memory: _ronde.Memory, shape: Sequence[int]) -> numpy.ndarray[Any, Any]:
    array: numpy.ndarray[Any, Any] = numpy.asarray(memory).view(dtype).reshape(shape)
    return array


def _numpy_empty(dtype: str, shape: Sequence[int]) -> Target:
    if dtype == "bfloat16":
        return _bfloat16_target(Bfloat16(numpy.empty(shape, numpy.uint16)))
    return _numpy_target(numpy.empty(shape, dtype=dtype))


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


def _bfloat16_source(tensor: Bfloat16) -> Source:
    bits = _numpy_source(tensor.bits)
    empty = functools.partial(_numpy_empty, "bfloat16")

    def view(memory: _ronde.Memory, shape: Sequence[int]) -> Bfloat16:
        return Bfloat16(_numpy_view(numpy.uint16, memory, shape))

    return Source(bits.owner, bits.address, "bfloat16", bits.shape, bits.nbytes, empty, view)


def _bfloat16_target(tensor: Bfloat16) -> Target:
    bits = _numpy_target(tensor.bits)

    def finish() -> Any:
        bits.finish()
        return tensor

    return Target(bits.owner, bits.address, "bfloat16", bits.shape, bits.nbytes, finish)


def _address(array: numpy.ndarray[Any, Any]) -> int:
    # Sized zero, some arrays have an address of no meaning; no byte of it is touched.
    address: int = array.__array_interface__["data"][0]
    return address


def _torch_source(tensor: torch.Tensor) -> Source:
    import torch

    if tensor.is_cuda:
        return _cuda_source(tensor)
    dense = _torch_dense(tensor)
    device, dtype, is_cpu = tensor.device, tensor.dtype, tensor.is_cpu
    name = torch_dtype_name(dtype)

    def empty(shape: Sequence[int]) -> Target:
        result = torch.empty(tuple(shape), dtype=dtype)
        finish = (lambda: result) if is_cpu else (lambda: result.to(device))
        return Target(result, result.data_ptr(), name, shape, result.nbytes, finish)

    view = functools.partial(_torch_view, dtype) if is_cpu else None
    return Source(dense, dense.data_ptr(), name, tensor.shape, dense.nbytes, empty, view, dense is tensor)


def _cuda_source(tensor: torch.Tensor) -> Source:
    from ronde import staging

    _check_dense_layout(tensor)
    device, dtype = tensor.device, tensor.dtype
    name = check_dtype(torch_dtype_name(dtype))
    loan = staging.from_device(tensor)

    def empty(shape: Sequence[int]) -> Target:
        import torch

        return _cuda_target(torch.empty(tuple(shape), dtype=dtype, device=device))

    return Source(loan, loan.tensor.data_ptr(), name, tensor.shape, loan.tensor.nbytes, empty)


def _cuda_target(tensor: torch.Tensor) -> Target:
    from ronde import staging

    loan = staging.for_device(tensor.shape, tensor.dtype)
    name, nbytes = torch_dtype_name(tensor.dtype), loan.tensor.nbytes
    return Target(loan, loan.tensor.data_ptr(), name, tensor.shape, nbytes, lambda: staging.to_device(loan, tensor))


def _torch_view(dtype: torch.dtype, memory: _ronde.Memory, shape: Sequence[int]) -> torch.Tensor:
    import torch

    name = torch_dtype_name(dtype)
    # NumPy has no bfloat16, and PyTorch does not take all of its other types.
    bits = _numpy_view(numpy.int16 if name in ("bfloat16", "uint16") else name, memory, shape)
    tensor = torch.from_numpy(bits)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _torch_target(tensor: torch.Tensor) -> Target:
    import torch

    check_dtype(torch_dtype_name(tensor.dtype))
    _check_dense_layout(tensor)
    if tensor.is_cuda:
        return _cuda_target(tensor)
    if _is_dense(tensor):
        return _torch_memory(tensor, lambda: tensor)
    staged = torch.empty(tensor.shape, dtype=tensor.dtype)

    def finish() -> Any:
        with torch.no_grad():
            tensor.copy_(staged)
        return tensor

    return _torch_memory(staged, finish)


def _torch_memory(tensor: torch.Tensor, finish: Callable[[], Any]) -> Target:
    dtype = torch_dtype_name(tensor.dtype)
    # The memory stays, also when the tensor is given other memory meanwhile.
    return Target(tensor.detach(), tensor.data_ptr(), dtype, tensor.shape, tensor.nbytes, finish)


def _torch_dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in main memory, contiguous."""
    _check_dense_layout(tensor)
    check_dtype(torch_dtype_name(tensor.dtype))
    if _is_dense(tensor):
        return tensor
    dense = tensor.detach()
    if dense.device.type != "cpu":
        dense = dense.cpu()
    return dense.resolve_neg().contiguous()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements of a strided tensor lie in main memory as they are counted."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


def _check_dense_layout(tensor: torch.Tensor) -> None:
    import torch

    if tensor.layout != torch.strided:
        raise ValueError(f"tensors of layout {tensor.layout} are not supported; make it dense with to_dense()")


@functools.cache
def torch_dtype_name(dtype: torch.dtype) -> str:
    """The name of a PyTorch type as ronde has it."""
    return str(dtype).partition(".")[2]


def _kind(tensor: Any) -> str:
    return f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
