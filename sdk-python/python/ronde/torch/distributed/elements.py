"""Conversion between tensors of `torch.distributed` and elements of types that a sidecar supports.

A sidecar has fewer types than PyTorch. Collectives that only move elements send the bits as a type of the same size.
Complex numbers are sent as pairs of real ones, which is correct for sums, too. Shapes are those of the operation, not
of the tensors: PyTorch's collectives check only numbers of elements.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Callable

import torch

from ronde.tensors import DTYPES, Source, Target, source_of, target_of, torch_dtype_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde import _ronde

Read = Callable[["_ronde.Operation"], Any]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_elements(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the detached tensor as a type that a sidecar moves, in the same memory.

    Complex numbers get a last dimension of 2. Raises ValueError for a layout or a type that cannot be moved.
    """
    if tensor.layout != torch.strided:
        raise ValueError(f"tensors of layout {tensor.layout} are not supported here; make it dense with to_dense()")
    elements = tensor.detach()
    if elements.is_complex():
        elements = torch.view_as_real(elements)
    bits = bits_of(elements.dtype)
    return elements if bits == elements.dtype else elements.view(bits)


@functools.cache
def bits_of(dtype: torch.dtype) -> torch.dtype:
    """Returns the type as which elements are moved. Raises ValueError for a type of another size."""
    if torch_dtype_name(dtype) in DTYPES:
        return dtype
    bits = None if dtype.is_complex else _BITS.get(dtype.itemsize)
    if bits is None or "quint" in str(dtype) or "qint" in str(dtype):
        raise ValueError(f"tensors of type {dtype} are not supported; convert the tensor first")
    return bits


def is_lazy(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a conjugated or negated view, which holds other elements than its memory does."""
    return tensor.is_conj() or tensor.is_neg()


def resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose memory holds its elements: the same one unless it is such a view."""
    return tensor.resolve_conj().resolve_neg() if is_lazy(tensor) else tensor


def check_summed(tensor: torch.Tensor, is_sum: bool) -> None:
    """Raises ValueError for a type whose bits cannot be reduced.

    is_sum -- whether the reduction is correct for complex numbers as pairs
    """
    dtype = tensor.dtype
    if torch_dtype_name(dtype) in DTYPES or (dtype.is_complex and is_sum):
        return
    kind = "only summed and averaged" if dtype.is_complex else "only moved, not reduced"
    raise ValueError(f"tensors of type {dtype} are {kind} by the backend ronde; convert the tensor first")


def input_of(tensor: torch.Tensor, *shape: int) -> Source:
    """Returns a tensor as the input of an operation with this shape; default: one dimension."""
    source = source_of(as_elements(resolved(tensor)))
    source.is_writable = source.is_writable and not is_lazy(tensor)
    source.shape = shape or (math.prod(source.shape),)
    return source


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenates the elements of tensors."""
    return torch.cat([as_elements(resolved(tensor)).reshape(-1) for tensor in tensors])


def place_in(tensor: torch.Tensor) -> Target:
    """Returns a tensor as the target of a result."""
    if not is_lazy(tensor):
        return target_of(as_elements(tensor))
    # No memory holds the elements of a conjugated or negated view, so assign the whole result to it.
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    target = target_of(as_elements(staged))
    finish = target.finish

    def assign() -> torch.Tensor:
        finish()
        with torch.no_grad():
            tensor.copy_(staged)
        if tensor.is_cuda:
            # Another stream than the one for which memory was allocated may use it.
            for used in (staged, tensor):
                used.record_stream(torch.cuda.current_stream(used.device))
        return tensor

    target.finish = assign
    return target


def read_into(tensor: torch.Tensor, from_rank: str = "the ranks", source: Source | None = None) -> Read:
    """Returns a reader of a result, with the same number of elements and type, into a tensor.

    source -- the source of the same tensor, if it is the input as well

    The reader raises ValueError for a result that does not fit.
    """
    if source is not None and source.is_writable:
        parts = (source.owner, source.address, source.dtype, source.shape, source.nbytes)
        target = Target(*parts, lambda: None, source.place)
    else:
        target = place_in(tensor)
    wanted = math.prod(target.shape)

    def read(operation: _ronde.Operation) -> None:
        elements, dtype = math.prod(operation.shape()), operation.dtype()
        if (elements, dtype) != (wanted, target.dtype):
            raise ValueError(
                f"{from_rank} sent {elements} elements of {dtype}, where the tensor for them has {wanted} of "
                f"{target.dtype}"
            )
        target.fill(operation)

    return read


def fill(places: Sequence[torch.Tensor], result: torch.Tensor) -> None:
    """Fills tensors with the elements of a result, in order. Raises ValueError if they do not fit."""
    written = [
        torch.empty(place.shape, dtype=place.dtype, device=place.device) if is_lazy(place) else place
        for place in places
    ]
    flat = [as_elements(each) for each in written]
    counts = [place.numel() for place in flat]
    if sum(counts) != result.numel() or (flat and flat[0].dtype != result.dtype):
        dtype = flat[0].dtype if flat else "no type"
        raise ValueError(
            f"a result of {result.numel()} elements of {result.dtype} does not fit the tensors given for it, which "
            f"have {counts} of {dtype}"
        )
    for place, part in zip(flat, result.reshape(-1).split(counts)):
        place.copy_(part.view(place.shape))
    with torch.no_grad():
        for given, each in zip(places, written):
            if each is not given:
                given.copy_(each)
