"""The collectives of `ronde.jax`."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy

from ronde.call_site import call_site
from ronde.jax import session
from ronde.jax.carriers import carrier_of
from ronde.jax.primitive import perform
from ronde.jax.request import Request
from ronde.ops import OPS, Average
from ronde.submission import rank_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.process_set import ProcessSet

_CODECS = ("", "float16", "bfloat16")


def allreduce(
    tensor: Any,
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    codec: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Reduces all ranks' arrays element by element. Every rank gets the result, of the input's type and shape.

    tensor -- an array; type and shape, and op, scales and codec, are the same on all ranks. Types are those of
              `ronde.Client.allreduce`; for Sum and Average also complex64 and complex128; for Sum, Product and bitwise
              operations without scales also uint32 and uint64
    op     -- Average, Sum, Min, Max, Product, Adasum, BitAnd, BitOr or BitXor, as `ronde.Client.allreduce` defines them
    name   -- identifies the operation on all ranks. Default: its place in the order of calls
    prescale_factor, postscale_factor -- multiply each rank's array before the reduction and the result after it; finite
              and not 0
    codec  -- "float16" or "bfloat16": how float32 travels between sidecars
    process_set -- the ranks that take part; default: all ranks of the job

    The gradient, of a Sum or Average, is the same reduction of the ranks' gradients. `jax.vmap` reduces the whole batch
    at once.

    Raises ValueError for invalid arguments and before `init`. On concrete arrays it raises the errors of
    `ronde.Client.allreduce`; a compiled program raises `jax.errors.JaxRuntimeError` with their text (`failure_of`).
    """
    options = {"prescale": prescale_factor, "postscale": postscale_factor, "codec": codec}
    return _reduce("allreduce", [tensor], op, name, process_set, options)[0]


def grouped_allreduce(
    tensors: Any,
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    codec: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """`allreduce` of all arrays of a pytree as one operation. Returns a pytree of the same structure.

    This is much faster than an operation for each array: the operations of a program run one after another, but the
    parts of a group run at the same time. Arguments and errors are those of `allreduce`.
    """
    leaves, structure = jax.tree.flatten(tensors)
    if not leaves:
        return tensors
    options = {"prescale": prescale_factor, "postscale": postscale_factor, "codec": codec}
    return jax.tree.unflatten(structure, _reduce("allreduce", leaves, op, name, process_set, options))


def allgather(
    tensor: Any,
    name: str | None = None,
    *,
    rows: Sequence[int] | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Concatenates all ranks' arrays along the first dimension, on every rank.

    tensor -- an array with at least one dimension. All but the first are the same on all ranks. Any type of
              `allreduce` and the types float8_*
    rows   -- the size of the first dimension on each rank, the same list on all ranks. Default: in a compiled program
              and for gradients that of this rank; on concrete arrays whatever the ranks have

    The gradient for this rank's rows is the sum of the ranks' gradients for them. Raises what `allreduce` does.
    """
    array = _with_rows(tensor, "allgather")
    request = _request("allgather", name, process_set)
    if rows is not None:
        given = _counts(rows, request, "rows")
        if given[request.place] != array.shape[0]:
            raise ValueError(f"rows is {list(given)}, but this rank has {array.shape[0]} rows")
        request = request.changed(rows=given)
    return _perform([array], request)[0]


def broadcast(tensor: Any, root_rank: int, name: str | None = None, *, process_set: ProcessSet | None = None) -> Any:
    """Sends the array of rank `root_rank` to every rank.

    tensor    -- an array; its type and shape are the same on all ranks. Any type of `allgather`
    root_rank -- a rank of the job, in the process set; the same on all ranks

    The root's gradient is the sum of all ranks' gradients, that of other ranks is 0. Raises what `allreduce` does.
    """
    return broadcast_all([tensor], root_rank, name, process_set)[0]


def alltoall(
    tensor: Any,
    splits: Sequence[int] | None = None,
    name: str | None = None,
    *,
    received_splits: Sequence[int] | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Sends rows of the array to each rank, and returns the rows that all ranks have sent to this one.

    tensor -- an array with at least one dimension. All but the first are the same on all ranks. Any type of `allgather`
    splits -- how many rows each rank gets, in the order of ranks; they add up to the number of rows. Default: equal
              numbers
    received_splits -- how many rows each rank sends to this one. With `splits`, a compiled program and a gradient need
              them

    Returns the array, or with `splits` the array and the received splits, as an int32 array. Raises what `allreduce`
    does.
    """
    array = _with_rows(tensor, "alltoall")
    request = _request("alltoall", name, process_set)
    if splits is None:
        if received_splits is not None or array.shape[0] % len(request.ranks):
            raise ValueError(
                f"alltoall without splits sends equal numbers of rows, but {array.shape[0]} rows are for "
                f"{len(request.ranks)} ranks; give splits"
            )
        return _perform([array], request)[0]
    sent = _counts(splits, request, "splits")
    if sum(sent) != array.shape[0]:
        raise ValueError(f"splits is {list(sent)}, which does not add up to the {array.shape[0]} rows")
    received = _received(array, received_splits, request, sent)
    result = _perform([array], request.changed(splits=sent, rows=received))[0]
    return result, jnp.asarray(received, jnp.int32)


def reducescatter(
    tensor: Any,
    op: int = Average,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    process_set: ProcessSet | None = None,
) -> Any:
    """Reduces all ranks' arrays and returns this rank's rows of the result.

    tensor -- an array with at least one dimension, the same type and shape on all ranks. Of r rows over n ranks, the
              first r % n ranks get one more than r // n
    op     -- Average, Sum, Min, Max, Product, BitAnd, BitOr or BitXor

    The gradient, of a Sum or Average, consists of all ranks' gradients for their rows. Raises what `allreduce` does.
    """
    options = {"prescale": prescale_factor, "postscale": postscale_factor, "codec": None}
    return _reduce("reducescatter", [_with_rows(tensor, "reducescatter")], op, name, process_set, options)[0]


def barrier(name: str | None = None, *, process_set: ProcessSet | None = None) -> None:
    """Waits until all ranks have called it. In a compiled program, its place in the order of collectives waits.

    Raises what `allreduce` does.
    """
    perform([], _request("barrier", name, process_set))


def broadcast_all(
    tensors: Sequence[Any], root_rank: int, name: str | None, process_set: ProcessSet | None
) -> list[Any]:
    """`broadcast` of several arrays as one operation."""
    request = _request("broadcast", name, process_set)
    root = rank_number(root_rank)
    if root not in request.ranks:
        raise ValueError(f"root_rank is {root}, which is not one of the ranks {list(request.ranks)}")
    return _perform([_array(tensor) for tensor in tensors], request.changed(root=root))


def _reduce(
    kind: str,
    tensors: Sequence[Any],
    op: Any,
    name: str | None,
    process_set: ProcessSet | None,
    options: dict[str, Any],
) -> list[Any]:
    if not isinstance(op, int) or op not in OPS:
        raise ValueError(
            f"op is {op!r}; give ronde.jax.Average, Sum, Min, Max, Product, Adasum, BitAnd, BitOr or BitXor"
        )
    scales = (float(options["prescale"]), float(options["postscale"]))
    if not all(numpy.isfinite(scale) and scale != 0 for scale in scales):
        raise ValueError(f"the scales are {scales}; give finite numbers other than 0")
    codec = "" if options["codec"] is None else options["codec"]
    if codec not in _CODECS:  # here, because a compiled program would refuse it only when it runs
        raise ValueError(f'codec is {codec!r}; give "float16", "bfloat16" or None. Plugins are for hvd.client()')
    request = _request(kind, name, process_set)
    request = request.changed(op=int(op), prescale=scales[0], postscale=scales[1], codec=codec)
    return _perform([_array(tensor) for tensor in tensors], request)


def _perform(arrays: Sequence[Any], request: Request) -> list[Any]:
    for array in arrays:  # before ranks wait for each other
        carrier_of(array.dtype, request.kind, request.op, request.is_scaled)
    return perform(arrays, request)


def _request(kind: str, name: str | None, process_set: ProcessSet | None) -> Request:
    client = session.client()
    members = client._set(process_set)
    assert members.id is not None
    if name is not None and not isinstance(name, str):
        raise ValueError(f"name is {name!r}; give a text")
    return Request(kind, members.id, tuple(members.ranks), members.rank(), name=name, site=call_site() or "")


def _array(tensor: Any) -> Any:
    return tensor if isinstance(tensor, jax.Array) else jnp.asarray(tensor)


def _with_rows(tensor: Any, kind: str) -> Any:
    array = _array(tensor)
    if not array.shape:
        raise ValueError(f"{kind} takes an array with rows, and this is a scalar; give tensor.reshape(1)")
    return array


def _counts(given: Sequence[int], request: Request, what: str) -> tuple[int, ...]:
    if isinstance(given, jax.core.Tracer):
        raise ValueError(f"{what} is computed by the program; shapes depend on it, so give numbers")
    counts = tuple(operator.index(count) for count in numpy.asarray(given).tolist())
    if len(counts) != len(request.ranks) or any(count < 0 for count in counts):
        raise ValueError(f"{what} is {list(counts)}; give a number from 0 for each of the {len(request.ranks)} ranks")
    return counts


def _received(array: Any, given: Sequence[int] | None, request: Request, sent: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the rows from each rank. On concrete arrays the ranks exchange them."""
    if given is not None:
        return _counts(given, request, "received_splits")
    if isinstance(array, jax.core.Tracer):
        raise ValueError(
            "alltoall with splits needs received_splits in a compiled program and for gradients: the shape of the "
            "result depends on it"
        )
    counts = numpy.asarray(sent, numpy.int64)
    name = request.name and f"{request.name}.splits"
    received = session.client().alltoall(counts, name=name, process_set=session.set_of(request))
    return tuple(received.tolist())
