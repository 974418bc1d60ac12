"""Calls on several actors at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import ray

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["map_blocking", "nics_to_env_var"]


def map_blocking(fn: Callable[..., Any], collection: Iterable[Any]) -> list[Any]:
    """Returns the values of the references that `fn` returns for each item."""
    values: list[Any] = ray.get([fn(item) for item in collection])
    return values


def nics_to_env_var(nics: Sequence[str]) -> dict[str, str]:
    """Returns the variables that restrict sidecars to these networks, for `start(extra_env_vars=...)`."""
    names = ",".join(nics)
    return {"RONDE_SIDECAR_NETWORK_INTERFACES": names, "HOROVOD_GLOO_IFACE": nics[0], "NCCL_SOCKET_IFNAME": names}
