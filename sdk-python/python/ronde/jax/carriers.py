"""How JAX's types travel: as a type of ronde's, possibly several elements for one."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy

from ronde.ops import Average, BitAnd, BitOr, BitXor, Product, Sum
from ronde.tensors import DTYPES

_MOVING = ("allgather", "alltoall", "broadcast")
_COMPLEX = {"complex64": "float32", "complex128": "float64"}
_UNSIGNED = {"uint32": "int32", "uint64": "int64"}
# Their bits are the same for signed and unsigned integers.
_OF_BITS = (Sum, Product, BitAnd, BitOr, BitXor)


class Carrier(NamedTuple):
    """The type that travels, and how many elements of it one element becomes."""

    dtype: str
    factor: int = 1

    def __str__(self) -> str:
        return self.dtype if self.factor == 1 else f"{self.dtype}*{self.factor}"


def carrier_of(dtype: Any, kind: str, op: int, is_scaled: bool) -> Carrier:
    """Returns how a type travels in a collective.

    kind, op, is_scaled -- the collective, its reduction, and whether it multiplies by a scale

    Raises ValueError for a type with which the collective cannot compute.
    """
    name = numpy.dtype(dtype).name
    is_moving = kind in _MOVING
    if name in DTYPES:
        return Carrier(name)
    if name in _COMPLEX and (is_moving or op in (Sum, Average)):
        return Carrier(_COMPLEX[name], 2)
    if name in _UNSIGNED and (is_moving or (op in _OF_BITS and not is_scaled)):
        return Carrier(_UNSIGNED[name])
    if name.startswith("float8_") and is_moving:
        return Carrier("uint8")
    raise ValueError(_refusal(name, kind))


def _refusal(name: str, kind: str) -> str:
    if name in _COMPLEX:
        return f"{kind} of {name} is a Sum or an Average; other reductions are not defined for complex numbers"
    if name in _UNSIGNED:
        return f"{kind} of {name} is a Sum, Product, BitAnd, BitOr or BitXor without scales; convert it for others"
    if name.startswith("float8_"):
        return f"{kind} does not compute with {name}; convert it to bfloat16. broadcast, allgather and alltoall take it"
    return f"{kind} does not take {name}; ronde has {', '.join(sorted(DTYPES))}, and converts complex and uint types"


def to_carrier(array: numpy.ndarray[Any, Any], carrier: Carrier) -> numpy.ndarray[Any, Any]:
    """Returns a view of an array's elements as they travel. The array is copied if it is not contiguous."""
    if carrier == Carrier(array.dtype.name):
        return array
    tail = () if carrier.factor == 1 else (carrier.factor,)
    flat = numpy.ascontiguousarray(array).reshape(-1)
    view: numpy.ndarray[Any, Any] = flat.view(carrier.dtype).reshape(array.shape + tail)
    return view


def from_carrier(array: numpy.ndarray[Any, Any], carrier: Carrier, dtype: Any) -> numpy.ndarray[Any, Any]:
    """Returns a view of the elements of a result as the user's type."""
    if carrier == Carrier(numpy.dtype(dtype).name):
        return array
    shape = array.shape if carrier.factor == 1 else array.shape[:-1]
    view: numpy.ndarray[Any, Any] = array.reshape(-1).view(dtype).reshape(shape)
    return view
