"""Collectives on concrete arrays: through the client and NumPy, without compilation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy

from ronde.jax import session
from ronde.jax.carriers import carrier_of, from_carrier, to_carrier

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.client import Client
    from ronde.handle import GroupHandle, Handle
    from ronde.jax.request import Request


def perform(*arrays: Any, request: Request) -> list[Any]:
    """Performs a collective, as a group if there are several arrays. Results are on the devices of the arrays."""
    client = session.client()
    if request.kind == "barrier":
        client.barrier(request.name, process_set=session.set_of(request))
        return []
    carriers = [carrier_of(array.dtype, request.kind, request.op, request.is_scaled) for array in arrays]
    tensors = [to_carrier(numpy.asarray(array), carrier) for array, carrier in zip(arrays, carriers)]
    begun = _begin(client, tensors, request)
    found = begun.wait()
    if request.kind == "alltoall" and request.splits is not None:
        found, received = found
        _check_received(received.tolist(), request)
    results = found if len(arrays) > 1 else [found]
    return [
        _on_device_of(array, from_carrier(result, carrier, array.dtype))
        for array, carrier, result in zip(arrays, carriers, results)
    ]


def _begin(client: Client, tensors: Sequence[Any], request: Request) -> Handle | GroupHandle:
    """Submits the operation, or the group if there are several tensors."""
    options: dict[str, Any] = {"name": request.name, "process_set": session.set_of(request)}
    if request.kind in ("allreduce", "reducescatter"):
        options.update(op=request.op, prescale_factor=request.prescale, postscale_factor=request.postscale)
    if request.kind == "allreduce":
        options["codec"] = request.codec or None
    elif request.kind == "broadcast":
        options["root_rank"] = request.root
    elif request.kind == "alltoall" and request.splits is not None:
        return client.alltoall_async(tensors[0], list(request.splits), **options)
    kind = {"reducescatter": "reduce_scatter"}.get(request.kind, request.kind)
    if len(tensors) == 1:
        begun: Handle = getattr(client, f"{kind}_async")(tensors[0], **options)
        return begun
    group: GroupHandle = getattr(client, f"grouped_{kind}_async")(tensors, **options)
    return group


def _on_device_of(array: Any, result: Any) -> Any:
    """Returns a result as an array where the argument is, if the user has placed it."""
    if getattr(array, "committed", False):
        return jax.device_put(result, array.sharding)
    return jnp.asarray(result)


def _check_received(received: list[int], request: Request) -> None:
    """Raises ValueError if the user has announced other rows than the ranks have sent."""
    if request.rows is not None and received != list(request.rows):
        raise ValueError(f"received_splits is {list(request.rows)}, but the ranks have sent {received} rows")
