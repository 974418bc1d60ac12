"""The primitive of all collectives, and its rules for JAX's transformations.

JAX performs the primitive at once on concrete arrays, and compiles it into a call of ronde's handler in a program. It
has an *ordered effect*: JAX passes a token from each call to the next one, within a program, through its loops and
branches, and from program to program. XLA cannot reorder the calls then, whatever else each rank's program computes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ronde import _ronde
from ronde.jax import eager, internals
from ronde.jax.carriers import carrier_of
from ronde.jax.request import UNNAMED, Request
from ronde.ops import Adasum, Average, ClippedMean, Sum

if TYPE_CHECKING:
    from collections.abc import Sequence

_TARGET = "ronde_collective"
_LINEAR = (Sum, Average)
_MIXING = (Adasum, ClippedMean)  # their results depend on more than one element of each rank

collective_p = Primitive("ronde_collective")
collective_p.multiple_results = True
_effect = internals.ordered_effect()


def perform(arrays: Sequence[Any], request: Request) -> list[Any]:
    """Performs a collective on arrays, as a group if they are several, or makes it part of the program being traced."""
    results: list[Any] = collective_p.bind(*arrays, request=request)
    return results


def _abstract(*tensors: Any, request: Request) -> tuple[list[Any], set[Any]]:
    if request.kind == "barrier":
        return [], {_effect}
    shapes = [request.result_shape(tensor.shape) for tensor in tensors]
    return [jax.core.ShapedArray(shape, tensor.dtype) for shape, tensor in zip(shapes, tensors)], {_effect}


def _lower(context: Any, *operands: Any, request: Request) -> Sequence[Any]:
    """Makes the call of the handler, with the token as its first argument and result."""
    types = [carrier_of(aval.dtype, request.kind, request.op, request.is_scaled) for aval in context.avals_in]
    avals_in, avals_out = [internals.token, *context.avals_in], [internals.token, *context.avals_out]
    token, *results = _call_handler(
        context.replace(avals_in=avals_in, avals_out=avals_out),
        context.tokens_in.get(_effect),
        *operands,
        kind=request.kind,
        op=numpy.int64(request.op),
        prescale=numpy.float64(request.prescale),
        postscale=numpy.float64(request.postscale),
        codec=request.codec,
        root=numpy.int64(request.root),
        set=numpy.int64(request.set),
        rank=numpy.int64(request.ranks[request.place]),
        size=numpy.int64(len(request.ranks)),
        splits=",".join(map(str, request.splits or ())),
        types=",".join(map(str, types)),
        name=request.name or UNNAMED,
        site=request.site,
    )
    context.set_tokens_out(mlir.TokenSet({_effect: token}))
    return list(results)


def _refuse_device(context: Any, *operands: Any, request: Request) -> Sequence[Any]:
    raise NotImplementedError(
        f"{request.kind} of ronde.jax in a compiled program runs on CPUs only, and this one is compiled for "
        f"{' and '.join(context.module_context.platforms)}. Call it outside of jax.jit, where tensors go through host "
        "memory, or compile for the CPU: jax.jit under jax.default_device(jax.devices('cpu')[0])"
    )


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, request: Request) -> tuple[list[Any], list[Any]]:
    results = perform(primals, request)
    zeros = [ad.Zero(jax.typeof(result).to_tangent_aval()) for result in results]
    if all(type(tangent) is ad.Zero for tangent in tangents):
        return results, zeros
    _check_linear(request)
    _check_shapes(primals, results, request)
    # Those of integers are of a type without values. All others take part, so that ranks have equal groups.
    chosen = [index for index, primal in enumerate(primals) if jnp.issubdtype(jnp.result_type(primal), jnp.inexact)]
    moved = perform([ad.instantiate_zeros(tangents[index]) for index in chosen], request.derived("tangent"))
    found = dict(zip(chosen, moved))
    return results, [found.get(index, zero) for index, zero in enumerate(zeros)]


def _check_linear(request: Request) -> None:
    if request.kind in ("allreduce", "reducescatter") and request.op not in _LINEAR:
        raise NotImplementedError(
            f"{request.kind} has a gradient for Sum and Average, not for op {request.op}; put jax.lax.stop_gradient "
            "around its argument if none is to pass"
        )


def _check_shapes(primals: Sequence[Any], results: Sequence[Any], request: Request) -> None:
    """Checks that shapes follow from the request: the gradient is traced without values."""
    for primal, result in zip(primals, results):
        if result.shape != (expected := request.result_shape(jnp.shape(primal))):
            raise ValueError(
                f"the result of {request.kind} has shape {result.shape}, not {expected}, as ranks have different "
                "numbers of rows; give rows= or received_splits=, which the gradient needs"
            )


def _transpose(cotangents: Sequence[Any], *operands: Any, request: Request) -> list[Any]:
    chosen = [index for index, operand in enumerate(operands) if ad.is_undefined_primal(operand)]
    given = [ad.instantiate_zeros(cotangents[index]) for index in chosen]
    found = dict(zip(chosen, _transposed(given, [operands[index].aval for index in chosen], request)))
    return [found.get(index) for index in range(len(operands))]


def _transposed(given: Sequence[Any], avals: Sequence[Any], request: Request) -> list[Any]:
    """Returns the gradients of the sum of all ranks' losses for arguments of these types.

    given -- the gradients for the results
    """
    if request.kind == "allreduce":
        return perform(given, request.derived("gradient"))
    if request.kind == "broadcast":
        summed = perform(given, request.derived("gradient", kind="allreduce", op=Sum))
        is_root = request.ranks[request.place] == request.root
        return summed if is_root else [jnp.zeros_like(each) for each in summed]
    if request.kind == "alltoall":
        return perform(given, request.derived("gradient", splits=request.rows, rows=request.splits))
    if request.kind == "allgather" and request.rows is None:
        return perform(given, request.derived("gradient", kind="reducescatter", op=Sum))
    if request.kind == "allgather":
        summed = perform(given, request.derived("gradient", kind="allreduce", op=Sum, rows=None))
        return [each[request.own_rows()] for each in summed]
    assert request.kind == "reducescatter"
    return [_spread(each, aval.shape[0], request) for each, aval in zip(given, avals)]


def _spread(given: Any, total: int, request: Request) -> Any:
    """Returns the gradient of a reduce-scatter of so many rows: all ranks' rows, scaled as the rows were."""
    rows = request.shares(total)
    factor = request.prescale * request.postscale / (len(request.ranks) if request.op == Average else 1)
    gather = request.derived("gradient", kind="allgather", op=Sum, prescale=1.0, postscale=1.0, rows=rows)
    gathered = perform([given], gather)[0]
    return gathered if factor == 1 else gathered * jnp.asarray(factor, gathered.dtype)


def _batch(arrays: Sequence[Any], dimensions: Sequence[Any], *, request: Request) -> tuple[list[Any], list[Any]]:
    """One operation on all of a batch. Rows stay in front, the batch comes second."""
    if request.kind in ("allreduce", "broadcast"):
        if request.kind == "allreduce" and request.op in _MIXING:
            raise NotImplementedError(
                "jax.vmap of an Adasum or ClippedMean is not possible: both weigh whole tensors, not a batch of them. "
                "Reduce outside of jax.vmap, or use jax.lax.map"
            )
        return perform(arrays, request), list(dimensions)
    moved = [
        array if dimension is None else jnp.moveaxis(array, dimension, 1)
        for array, dimension in zip(arrays, dimensions)
    ]
    return perform(moved, request), [None if dimension is None else 1 for dimension in dimensions]


jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(_ronde.xla_handler()), platform="cpu", api_version=1)
_call_handler: Any = jax.ffi.ffi_lowering(_TARGET, has_side_effect=True)
collective_p.def_impl(eager.perform)
collective_p.def_effectful_abstract_eval(_abstract)
mlir.register_lowering(collective_p, _lower, platform="cpu")
mlir.register_lowering(collective_p, _refuse_device)
ad.primitive_jvps[collective_p] = _jvp
ad.primitive_transposes[collective_p] = _transpose
batching.primitive_batchers[collective_p] = _batch
