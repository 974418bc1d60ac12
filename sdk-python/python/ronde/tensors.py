"""Tensors of any library as address, length, dtype and shape, and results in the caller's own library.

The native client reads and writes memory by address. Only this module passes addresses to it, and it keeps the tensor
at an address alive for as long as the address is used.
"""

from __future__ import annotations

import ctypes
import functools
import math
import operator
import sys
from typing import TYPE_CHECKING, Any, Callable, Protocol

import numpy

from ronde import _ronde, device

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

DTYPES = frozenset(_ronde.DTYPES)


class Source:
    """A contiguous tensor in this process's memory, or on a GPU, to read from, and a constructor of results.

    Results are of the same library.

    is_writable -- whether `owner` is the user's tensor itself, into which a result may be written
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
        place: device.DevicePlace | None = None,
    ) -> None:
        self.owner = owner  # keeps the memory alive
        self.is_writable = is_writable
        self.place = place  # None in main memory
        self.address = address
        self.dtype = check_dtype(dtype)
        self.shape = tuple(shape)
        self.nbytes = nbytes
        self.empty = empty
        self.view = view  # None if results are always copied


class Target:
    """Memory that a result is read into; `finish` returns the tensor for the user.

    place  -- where it is, if that is on a GPU
    is_new -- whether it was allocated for the result, so that work of the caller's may still use it for another tensor
    """

    def __init__(
        self,
        owner: Any,
        address: int,
        dtype: str,
        shape: Sequence[int],
        nbytes: int,
        finish: Callable[[], Any],
        place: device.DevicePlace | None = None,
        is_new: bool = False,
    ) -> None:
        self.owner = owner  # keeps the memory alive
        self.place, self.is_new = place, is_new
        self.address = address
        self.dtype = check_dtype(dtype)
        self.shape = tuple(shape)
        self.nbytes = nbytes
        self.finish = finish

    def fill(self, operation: _ronde.Operation) -> Any:
        """Reads the result of a complete operation into the memory. Returns the tensor for the user.

        On a GPU the copy is started, and the current stream ordered after it.
        """
        if self.place is None or not self.nbytes:
            operation.read_into(self.address, self.nbytes)
        elif isinstance(operation, _ronde.Operation) and not operation.is_inline:
            device.deliver(operation, self, self.place)
        else:
            device.through_host(self, self.place, operation.read_into)
        return self.finish()


class Empty(Protocol):
    """Allocates memory for a result."""

    def __call__(self, shape: Sequence[int]) -> Target:
        """Returns memory for a result of this shape."""
        ...


class View(Protocol):
    """Makes a tensor that views a result in shared memory and keeps that memory alive."""

    def __call__(self, memory: _ronde.Memory, shape: Sequence[int]) -> Any:
        """Returns a tensor of this shape."""
        ...


class Bfloat16:
    """A tensor of bfloat16 for programs without PyTorch: a NumPy array of its elements' bits.

    bits -- a uint16 array; each element is the upper half of the float32 of the same value

    Raises ValueError for anything else. Collectives accept it as a tensor, and then their results are `Bfloat16`, too.
    """

    def __init__(self, bits: numpy.ndarray[Any, Any]) -> None:
        if not isinstance(bits, numpy.ndarray) or bits.dtype != numpy.uint16:
            raise ValueError(f"the bits of bfloat16 are a NumPy array of uint16, not {_kind(bits)}")
        self.bits = bits

    @classmethod
    def from_float32(cls, values: Any) -> Bfloat16:
        """Rounds an array to the nearest bfloat16 numbers, ties to even; any NaN becomes the quiet NaN."""
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
    """Returns any tensor as a source.

    It is of PyTorch, NumPy, DLPack, `__array_interface__`, `__cuda_array_interface__`, or the buffer protocol.
    """
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(tensor, torch_module.Tensor):
        return _torch_source(tensor)
    if isinstance(tensor, Bfloat16):
        return _bfloat16_source(tensor)
    if not isinstance(tensor, numpy.ndarray) and device.has_interface(tensor):
        return _interface_source(tensor)
    return _numpy_source(_as_array(tensor))


def target_of(tensor: Any) -> Target:
    """Returns a tensor of the user as the target of a result. It must be writable."""
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(tensor, torch_module.Tensor):
        return _torch_target(tensor)
    if isinstance(tensor, numpy.ndarray):
        return _numpy_target(tensor)
    if isinstance(tensor, Bfloat16):
        return _bfloat16_target(tensor)
    if device.has_interface(tensor):
        return _interface_target(tensor)
    raise ValueError(f"a result can be written into a NumPy array or a PyTorch tensor, not into {_kind(tensor)}")


def target_like(out: Any, source: Source) -> Target | None:
    """Returns the target for a result of the source's type and shape, if `out` is given."""
    if out is None:
        return None
    if out is source.owner and source.is_writable:
        # Keeps the memory alive, also if the PyTorch tensor gets other memory meanwhile.
        owner = out if isinstance(out, numpy.ndarray) else out.detach()
        return Target(owner, source.address, source.dtype, source.shape, source.nbytes, lambda: out)
    return check_target(target_of(out), source, source.shape)


def check_target(target: Target, source: Source, shape: tuple[int | None, ...]) -> Target:
    """Returns the target, after checking that a result of the source's type and of this shape fits."""
    if (target.dtype, target.shape) != (source.dtype, shape):
        raise ValueError(
            f"out is of type {target.dtype} and shape {target.shape}, but the result will be of type "
            f"{source.dtype} and shape {shape}"
        )
    return target


def owns_memory(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is contiguous in main memory and has its storage to itself."""
    import torch

    is_plain = type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous()
    return is_plain and not tensor.is_neg() and tensor.untyped_storage().nbytes() == tensor.nbytes


def kind_of(like: Any) -> Callable[[str, Sequence[int]], Target]:
    """Returns an allocator for results whose type and shape another rank determines.

    The results are PyTorch tensors if `like` is one, else NumPy arrays.
    """
    torch_module = sys.modules.get("torch")
    if torch_module is None or not isinstance(like, torch_module.Tensor):
        return _numpy_empty
    device = like.device

    def empty(dtype: str, shape: Sequence[int]) -> Target:
        result = torch_module.empty(tuple(shape), dtype=getattr(torch_module, dtype))
        return _torch_memory(result, lambda: result.to(device))

    return empty


def viewer_of(dtype: Any, shape: int | Sequence[int]) -> tuple[int, Callable[[_ronde.Memory], Any]]:
    """Returns the bytes of a tensor, and a function that makes one as a view of so much shared memory.

    dtype -- a PyTorch type for PyTorch tensors; a name or a NumPy type for NumPy arrays

    Raises ValueError for an unsupported type and an invalid shape.
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
    """Returns the name of a NumPy type, or "bfloat16", which NumPy lacks."""
    if isinstance(dtype, str) and dtype == "bfloat16":
        return dtype
    try:
        return str(numpy.dtype(dtype).name)
    except TypeError as error:
        raise ValueError(f"{dtype!r} is no type of elements: {error}") from error


def integers_like(like: Any, values: Sequence[int]) -> Any:
    """Returns integers as int32 of the library of `like`: PyTorch in main memory, else NumPy."""
    torch_module = sys.modules.get("torch")
    if torch_module is not None and isinstance(like, torch_module.Tensor):
        return torch_module.tensor(values, dtype=torch_module.int32)
    return numpy.array(values, dtype=numpy.int32)


def address_of(memory: Any) -> int:
    """Returns the address of shared memory, or of a NumPy array. It is valid while the object exists."""
    address: int = memory.__array_interface__["data"][0]
    return address


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copies bytes between two addresses that the caller keeps valid. Other threads run meanwhile."""
    ctypes.memmove(target, source, nbytes)


def check_dtype(name: str) -> str:
    """Returns the name of a supported type. Raises ValueError for others."""
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
    _check_no_mask(array)
    # Also converts other byte orders to the machine's.
    dtype = array.dtype.newbyteorder("=")
    dense = numpy.ascontiguousarray(array, dtype=dtype)

    def empty(shape: Sequence[int]) -> Target:
        return _numpy_target(numpy.empty(shape, dtype=dtype))

    view = functools.partial(_numpy_view, dtype)
    is_writable = dense is array and array.flags.writeable
    # `ascontiguousarray` makes a scalar one-dimensional, so use the original's shape.
    return Source(dense, _address(dense), dense.dtype.name, array.shape, dense.nbytes, empty, view, is_writable)


def _check_no_mask(array: numpy.ndarray[Any, Any]) -> None:
    """Raises ValueError for an array with masked elements: the mask would get lost, and these elements would count."""
    if type(array) is not numpy.ndarray and numpy.ma.is_masked(array):
        raise ValueError("masked elements are not supported; give them a value: array.filled(0)")


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
    _check_no_mask(array)
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
    # Some arrays of size zero have an invalid address; the client accesses no byte of it.
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
    import torch

    _check_dense_layout(tensor)
    dtype = tensor.dtype
    name = check_dtype(torch_dtype_name(dtype))

    def empty(shape: Sequence[int]) -> Target:
        target = _cuda_target(torch.empty(tuple(shape), dtype=dtype, device=tensor_device))
        target.is_new = True
        return target

    tensor_device = tensor.device
    if device.is_copied_by_torch():
        lease = device.copied_to_host(device.place_of(tensor))
        return Source(lease, lease.tensor.data_ptr(), name, tensor.shape, lease.tensor.nbytes, empty)
    # On the GPU, by the current stream; the native client's copy comes after it.
    dense = tensor.detach().resolve_neg().contiguous()
    place = device.place_of(dense)
    return Source(dense, dense.data_ptr(), name, tensor.shape, dense.nbytes, empty, place=place)


def _cuda_target(tensor: torch.Tensor) -> Target:
    import torch

    name = torch_dtype_name(tensor.dtype)
    if device.is_copied_by_torch():
        return _staged_target(tensor)
    is_direct = tensor.is_contiguous() and not tensor.is_neg()
    dense = tensor.detach() if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def finish() -> torch.Tensor:
        if not is_direct:
            with torch.no_grad():
                tensor.copy_(dense)
            # The thread that finishes an operation may use another stream than the one for which memory was allocated.
            for used in (dense, tensor):
                used.record_stream(torch.cuda.current_stream(used.device))
        return tensor

    place = device.place_of(dense)
    return Target(dense, dense.data_ptr(), name, tensor.shape, dense.nbytes, finish, place, not is_direct)


def _staged_target(tensor: torch.Tensor) -> Target:
    """Returns page-locked memory, from which PyTorch copies the result to its GPU."""
    from ronde import staging

    lease = staging.for_device(tensor.shape, tensor.dtype)
    name, nbytes = torch_dtype_name(tensor.dtype), lease.tensor.nbytes
    return Target(lease, lease.tensor.data_ptr(), name, tensor.shape, nbytes, lambda: staging.to_device(lease, tensor))


def _interface_source(owner: Any) -> Source:
    array = device.array_of(owner)

    def empty(shape: Sequence[int]) -> Target:
        raise ValueError(
            f"ronde cannot allocate memory for a result of {_kind(owner)}; give out=, an array of shape {tuple(shape)}"
        )

    return Source(owner, array.address, array.dtype.name, array.shape, array.nbytes, empty, place=array.place)


def _interface_target(owner: Any) -> Target:
    array = device.array_of(owner)
    if not array.is_writable:
        raise ValueError("the array on the GPU is read-only, so no result can be written into it; give a copy")
    dtype, place = array.dtype.name, array.place
    return Target(owner, array.address, dtype, array.shape, array.nbytes, lambda: owner, place)


def _torch_view(dtype: torch.dtype, memory: _ronde.Memory, shape: Sequence[int]) -> torch.Tensor:
    import torch

    name = torch_dtype_name(dtype)
    # NumPy has no bfloat16, and PyTorch does not accept all of NumPy's other types.
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
    # Keeps the memory alive, also if the tensor gets other memory meanwhile.
    return Target(tensor.detach(), tensor.data_ptr(), dtype, tensor.shape, tensor.nbytes, finish)


def _torch_dense(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, contiguous in main memory."""
    _check_dense_layout(tensor)
    check_dtype(torch_dtype_name(tensor.dtype))
    if _is_dense(tensor):
        return tensor
    dense = tensor.detach()
    if dense.device.type != "cpu":
        dense = dense.cpu()
    return dense.resolve_neg().contiguous()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Returns whether a strided tensor is contiguous in main memory."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()


def _check_dense_layout(tensor: torch.Tensor) -> None:
    import torch

    if tensor.layout != torch.strided:
        raise ValueError(f"tensors of layout {tensor.layout} are not supported; make it dense with to_dense()")


@functools.cache
def torch_dtype_name(dtype: torch.dtype) -> str:
    """Returns ronde's name of a PyTorch type."""
    return str(dtype).partition(".")[2]


def _kind(tensor: Any) -> str:
    return f"a {type(tensor).__module__}.{type(tensor).__qualname__}"
