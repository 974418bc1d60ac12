"""Calls on several actors at once, and the networks of their nodes."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, Callable

import ray

from horovod.runner.util.network import filter_local_addresses, get_local_intfs

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

__all__ = ["detect_nics", "map_blocking", "nics_to_env_var"]


def map_blocking(fn: Callable[..., Any], collection: Iterable[Any]) -> list[Any]:
    """Returns the values of the references that `fn` returns for each item."""
    values: list[Any] = ray.get([fn(item) for item in collection])
    return values


def nics_to_env_var(nics: Collection[str]) -> dict[str, str]:
    """Returns the variables that restrict sidecars to these networks, for `start(extra_env_vars=...)`.

    nics -- at least one; the order of a set is that of the names
    """
    ordered = sorted(nics) if isinstance(nics, (set, frozenset)) else list(nics)
    names = ",".join(ordered)
    return {"RONDE_SIDECAR_NETWORK_INTERFACES": names, "HOROVOD_GLOO_IFACE": ordered[0], "NCCL_SOCKET_IFNAME": names}


def detect_nics(
    settings: Any, all_host_names: Sequence[str] | None = None, node_workers: Sequence[Any] | None = None
) -> list[str]:
    """Returns the names of the network interfaces that all nodes have, in ascending order.

    settings       -- if it has `nics`, these are returned
    all_host_names -- the hosts; only needed without `node_workers`, and then they must be this one
    node_workers   -- an actor of `BaseHorovodWorker` on each node; without them, or with one, the loopback is returned

    Raises ValueError for other hosts without actors there, and RuntimeError if the nodes have no name in common.
    `RayExecutor` does not need it: sidecars try all addresses unless `nics` names some.
    """
    if settings.nics:
        names = settings.nics.split(",") if isinstance(settings.nics, str) else settings.nics
        return sorted(name.strip() for name in names)
    workers = list(node_workers or ())
    if not workers and (others := filter_local_addresses(all_host_names or ())):
        raise ValueError(f"{', '.join(others)} are other hosts; give node_workers, an actor on each of them")
    if len(workers) < 2:
        return sorted(get_local_intfs())
    found = map_blocking(lambda worker: worker.execute.remote(_interfaces), workers)
    common = set.intersection(*found)
    if not common:
        lists = "; ".join(", ".join(sorted(each)) or "none" for each in found)
        raise RuntimeError(f"the nodes have no network interface with a common name: {lists}; give settings.nics")
    return sorted(common)


def _interfaces(executable: Any) -> set[str]:
    """Returns the names of the interfaces of a worker's node, without the loopback."""
    del executable
    return {name for _, name in socket.if_nameindex()} - set(get_local_intfs())
