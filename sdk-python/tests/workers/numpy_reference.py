"""What reductions give by NumPy, and how far from that a result may be.

Integers and booleans are exact: sums and products wrap, an average is the wrapped sum's quotient truncated toward
zero, factors multiply as float64 and truncate, saturating; an average with a postscale is the sum times postscale /
n, truncated. Floating-point references are computed in float64 (float64's own in long double, where the machine has a
longer one). A result r of a reference R is good when |r - R| <= bound, where u is the type's unit roundoff (half an
ulp of 1), n the number of ranks, and S the sum of the absolute values of the terms, scaled as the result is:

sum, average    (n + 2) u S. Each term is rounded when prescaled, n - 1 times when it is added to others, and once when
                the result is scaled: n + 1 roundings, and one unit for their products. float16 and bfloat16 are rounded
                at most that often, as they are added in float32 where they lie in one place.
  with a codec  (2 c + c^2) S more, where c is the codec's unit roundoff: contributions and result are encoded once each
product         2 (n + 1) u |R|: n roundings by prescaling, n - 1 by multiplying, one by scaling, and slack for products
min, max        0: scaling is monotonic and is computed here exactly as it is specified
median          0 for an odd number of ranks, for the same reason; otherwise 3 u M, where M is the larger of the two
                middle values' magnitudes: they are added, halved and scaled
clipped mean    (4 u + (e + n + 8) 2^-53) S with e elements: weights come from sums of e squares in float64, the
                weighted sum is rounded once, and so is its scaling
adasum          3 u S for the rounding of the sum and of its scaling, and what the weights are off by: they come from
                inner products of e elements in float64, so a square of a norm is off by at most (e + n^2) 2^-53 of the
                square of the sum of the norms of its terms; the more vectors cancel, the larger is that of what remains

Rounding near zero adds (n + 3) times half of the least denormal number.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import numpy

Array = Any


@dataclasses.dataclass(frozen=True)
class Type:
    """An element type: its name, what NumPy computes it in here, and how it rounds."""

    name: str
    kind: str  # "i" integer, "f" floating-point, "b" bool
    array: str  # the NumPy type that holds its values; bfloat16's are held as float32
    wide: Any = None
    unit: float = 0.0
    least: float = 0.0  # half of the least denormal number


TYPES = {
    each.name: each
    for each in [
        *[Type(name, "i", name) for name in ("uint8", "int8", "uint16", "int16", "int32", "int64")],
        Type("float16", "f", "float16", numpy.float64, 2.0**-11, 2.0**-25),
        Type("bfloat16", "f", "float32", numpy.float64, 2.0**-8, 2.0**-134),
        Type("float32", "f", "float32", numpy.float64, 2.0**-24, 2.0**-150),
        Type("float64", "f", "float64", numpy.longdouble, 2.0**-53, 5e-324),
        Type("bool", "b", "bool"),
    ]
}
CODECS = {"float16": TYPES["float16"], "bfloat16": TYPES["bfloat16"]}


@dataclasses.dataclass
class Expected:
    """A result by NumPy, and by how much each element may differ; NaN and infinities not at all."""

    values: Array
    bound: Array = 0.0

    def rows(self, start: int, end: int) -> Expected:
        """Some rows of it."""
        bound = self.bound[start:end] if isinstance(self.bound, numpy.ndarray) else self.bound
        return Expected(self.values[start:end], bound)

    def excess(self, result: Array) -> float:
        """The largest difference in bounds: good up to 1. Infinite for another shape, NaN or infinity."""
        if result.shape != self.values.shape:
            return float("inf")
        if self.values.dtype.kind not in "fc":
            return 0.0 if numpy.array_equal(result, self.values) else float("inf")
        result = result.astype(self.values.dtype)
        special = ~numpy.isfinite(self.values)
        if not numpy.array_equal(result[special], self.values[special], equal_nan=True):
            return float("inf")
        off = numpy.abs(result[~special] - self.values[~special])
        bound = numpy.broadcast_to(self.bound, self.values.shape)[~special]
        over = numpy.divide(off, bound, out=numpy.where(off > 0, numpy.inf, 0.0), where=bound > 0)
        return float(numpy.max(over, initial=0.0))


def reduction(
    op: str, dtype: str, tensors: list[Array], prescale: float = 1.0, postscale: float = 1.0, codec: str | None = None
) -> Expected:
    """The reduction of the tensors, in the order of ranks."""
    kind = TYPES[dtype]
    if kind.kind != "f":
        return Expected(_exact(op, kind, tensors, prescale, postscale))
    with numpy.errstate(all="ignore"):
        if op in ("sum", "average"):
            return _sum(op, kind, tensors, prescale, postscale, codec)
        return _FLOATING[op](kind, tensors, prescale, postscale)


def scaled(kind: Type, tensor: Array, factor: float) -> Array:
    """A tensor multiplied as specified, rounded to its type."""
    if factor == 1.0:
        return tensor
    if kind.kind == "b":
        return tensor & (abs(factor) >= 1.0)
    if kind.kind == "i":
        return _saturated(numpy.trunc(tensor.astype(numpy.float64) * factor), tensor.dtype)
    if kind.name == "bfloat16":
        return rounded(kind, (tensor.astype(numpy.float64) * factor).astype(numpy.float32))
    if kind.name == "float16":
        return (tensor.astype(numpy.float64) * factor).astype(numpy.float32).astype(numpy.float16)
    return (tensor.astype(numpy.float64) * factor).astype(tensor.dtype)


def rounded(kind: Type, values: Array) -> Array:
    """Values as the type has them, in the NumPy type that holds it."""
    array = numpy.asarray(values).astype(kind.array)
    if kind.name != "bfloat16":
        return array
    bits = numpy.atleast_1d(array).view(numpy.uint32)
    nearest = (bits + (numpy.uint32(0x7FFF) + (bits >> 16 & 1))) & numpy.uint32(0xFFFF0000)
    nearest = numpy.where(numpy.isnan(numpy.atleast_1d(array)), numpy.uint32(0x7FC00000), nearest)
    return nearest.astype(numpy.uint32).view(numpy.float32).reshape(array.shape)


def _exact(op: str, kind: Type, tensors: list[Array], prescale: float, postscale: float) -> Array:
    operands = [scaled(kind, tensor, prescale) for tensor in tensors]
    combine = _OF_BOOL[op] if kind.kind == "b" else _OF_INTEGERS.get(op, numpy.add)
    with numpy.errstate(over="ignore"):
        total = operands[0].copy()
        for operand in operands[1:]:
            total = numpy.asarray(combine(total, operand)).astype(total.dtype)
    if op == "average" and postscale != 1.0:
        return scaled(kind, total, postscale / len(tensors))
    if op == "average":
        whole = total.astype(numpy.int64)
        # Toward zero, unlike `//`.
        whole = whole // len(tensors) + ((whole < 0) & (whole % len(tensors) != 0))
        total = whole.astype(total.dtype)
    return scaled(kind, total, postscale)


def _saturated(values: Array, dtype: Any) -> Array:
    least, greatest = numpy.iinfo(dtype).min, numpy.iinfo(dtype).max
    # 2^63 is the nearest float64 to the greatest int64, which it does not fit.
    over, under = values >= float(greatest), values <= float(least)
    inside = numpy.where(over | under, 0.0, values).astype(dtype)
    return numpy.where(over, greatest, numpy.where(under, least, inside)).astype(dtype)


def _near_zero(kind: Type, ranks: int, postscale: float) -> float:
    return (ranks + 3) * kind.least * max(1.0, abs(postscale))


def _sum(op: str, kind: Type, tensors: list[Array], prescale: float, postscale: float, codec: str | None) -> Expected:
    n = len(tensors)
    factor = kind.wide(postscale) / (n if op == "average" else 1)
    terms = numpy.stack([tensor.astype(kind.wide) * prescale for tensor in tensors])
    magnitude = numpy.abs(terms).sum(axis=0) * abs(factor)
    bound = (n + 2) * kind.unit * magnitude + _near_zero(kind, n, postscale)
    if codec is not None:
        lossy = CODECS[codec]
        bound += (2 * lossy.unit + lossy.unit**2) * magnitude + _near_zero(lossy, n, postscale)
    return Expected(terms.sum(axis=0) * factor, bound)


def _product(kind: Type, tensors: list[Array], prescale: float, postscale: float) -> Expected:
    n = len(tensors)
    product = numpy.stack([tensor.astype(kind.wide) * prescale for tensor in tensors]).prod(axis=0) * postscale
    return Expected(product, 2 * (n + 1) * kind.unit * numpy.abs(product) + _near_zero(kind, n, postscale))


def _extreme(combine: Any) -> Callable[[Type, list[Array], float, float], Expected]:
    def extreme(kind: Type, tensors: list[Array], prescale: float, postscale: float) -> Expected:
        best = combine.reduce(numpy.stack([scaled(kind, tensor, prescale) for tensor in tensors]))
        return Expected(scaled(kind, numpy.asarray(best), postscale))

    return extreme


def _median(kind: Type, tensors: list[Array], prescale: float, postscale: float) -> Expected:
    n = len(tensors)
    ordered = numpy.sort(numpy.stack([scaled(kind, tensor, prescale) for tensor in tensors]), axis=0)
    # NumPy sorts NaN to the end, and it wins.
    spoiled = numpy.isnan(ordered[-1])
    if n % 2:
        middle = numpy.asarray(scaled(kind, numpy.asarray(ordered[n // 2]), postscale))
        return Expected(numpy.where(spoiled, middle.dtype.type("nan"), middle))
    low, high = (ordered[index].astype(kind.wide) for index in (n // 2 - 1, n // 2))
    bound = 3 * kind.unit * numpy.maximum(numpy.abs(low), numpy.abs(high)) * abs(postscale)
    middle = numpy.where(spoiled, kind.wide("nan"), (low + high) / 2 * postscale)
    return Expected(middle, bound + _near_zero(kind, n, postscale))


def _clipped_mean(kind: Type, tensors: list[Array], prescale: float, postscale: float) -> Expected:
    n = len(tensors)
    operands = [scaled(kind, tensor, prescale).astype(kind.wide) for tensor in tensors]
    norms = [numpy.sqrt((operand**2).sum()) for operand in operands]
    middle = numpy.median(norms)
    weights = [(min(1.0, middle / norm) if norm > 0 else 1.0) / n * postscale for norm in norms]
    magnitude = sum(abs(weight) * numpy.abs(operand) for weight, operand in zip(weights, operands))
    relative = 4 * kind.unit + (operands[0].size + n + 8) * 2.0**-53
    total = sum(weight * operand for weight, operand in zip(weights, operands))
    return Expected(numpy.asarray(total), relative * magnitude + _near_zero(kind, n, postscale))


def _adasum(kind: Type, tensors: list[Array], prescale: float, postscale: float) -> Expected:
    n = len(tensors)
    operands = [scaled(kind, tensor, prescale).astype(numpy.longdouble).ravel() for tensor in tensors]
    nodes = [_Node(operand, {rank: numpy.longdouble(1.0)}) for rank, operand in enumerate(operands)]
    excess = n - (1 << (n.bit_length() - 1))
    nodes = [_Node.of(*nodes[2 * i : 2 * i + 2], operands) for i in range(excess)] + nodes[2 * excess :]
    while len(nodes) > 1:
        nodes = [_Node.of(*nodes[i : i + 2], operands) for i in range(0, len(nodes), 2)]
    root = nodes[0]
    magnitude = sum(abs(weight) * numpy.abs(operands[rank]) for rank, weight in root.weights.items())
    # Weights are products of coefficients, each off by what the norms below are off by.
    doubt = 8 * n * (operands[0].size + n * n) * 2.0**-53 * root.cancelled**2
    spread = sum((abs(weight) + 1) * numpy.abs(operands[rank]) for rank, weight in root.weights.items())
    bound = (3 * kind.unit * magnitude + doubt * spread) * abs(postscale) + _near_zero(kind, n, postscale)
    shape = tensors[0].shape
    return Expected((root.vector * postscale).astype(kind.wide).reshape(shape), bound.reshape(shape))


@dataclasses.dataclass
class _Node:
    """A vector of Adasum's tree, as the combination of inputs that it is."""

    vector: Array
    weights: dict[int, Any]
    cancelled: float = 1.0  # the largest ratio, so far, of the terms' norms to the norm of their sum

    @classmethod
    def of(cls, a: _Node, b: _Node, operands: list[Array]) -> _Node:
        dot, norm_a, norm_b = (a.vector * b.vector).sum(), (a.vector**2).sum(), (b.vector**2).sum()
        least = numpy.sqrt(numpy.finfo(numpy.float64).tiny)
        of_a = 1 - dot / (2 * norm_a) if numpy.sqrt(norm_a) >= least else numpy.longdouble(1.0)
        of_b = 1 - dot / (2 * norm_b) if numpy.sqrt(norm_b) >= least else numpy.longdouble(1.0)
        weights = {rank: of_a * weight for rank, weight in a.weights.items()}
        weights.update({rank: of_b * weight for rank, weight in b.weights.items()})
        vector = of_a * a.vector + of_b * b.vector
        norm = float(numpy.sqrt((vector**2).sum()))
        terms = sum(float(abs(w)) * float(numpy.sqrt((operands[rank] ** 2).sum())) for rank, w in weights.items())
        cancelled = max(a.cancelled, b.cancelled, terms / norm if norm else (float("inf") if terms else 1.0))
        return cls(vector, weights, cancelled)


_OF_BOOL = {
    "sum": numpy.logical_or,
    "max": numpy.logical_or,
    "min": numpy.logical_and,
    "product": numpy.logical_and,
    "bit_and": numpy.logical_and,
    "bit_or": numpy.logical_or,
    "bit_xor": numpy.logical_xor,
}
_OF_INTEGERS = {
    "min": numpy.minimum,
    "max": numpy.maximum,
    "product": numpy.multiply,
    "bit_and": numpy.bitwise_and,
    "bit_or": numpy.bitwise_or,
    "bit_xor": numpy.bitwise_xor,
}
_FLOATING = {
    "product": _product,
    "min": _extreme(numpy.minimum),
    "max": _extreme(numpy.maximum),
    "median": _median,
    "clipped_mean": _clipped_mean,
    "adasum": _adasum,
}
