"""The nodes of the cluster as hosts of an elastic job, with a number of slots each."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from ronde.own_sidecar import LOCAL_RANKS_MAX
from ronde.ray.nodes import alive_nodes
from ronde.ray.strategy import Resources

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_log = logging.getLogger("ronde.ray")
_NODE_RESOURCE = "node:"


class RayHostDiscovery:
    """Finds the nodes of the cluster, and how many workers fit on each.

    use_gpu                      -- whether workers have GPUs
    cpus_per_slot, gpus_per_slot -- CPUs and GPUs for each
    """

    def __init__(self, use_gpu: bool = False, cpus_per_slot: float = 1, gpus_per_slot: float = 1) -> None:
        self.use_gpu, self.cpus_per_slot, self.gpus_per_slot = use_gpu, cpus_per_slot, gpus_per_slot

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Returns the slots of each address, of all nodes there."""
        found: dict[str, int] = {}
        for node in alive_nodes():
            if slots := self._slots(node):
                address = node["NodeManagerAddress"]
                found[address] = found.get(address, 0) + slots
        return found

    def slots_of_nodes(self) -> dict[str, int]:
        """Returns the slots of each node, by Ray's ID of it; only nodes that have some."""
        return {node["NodeID"]: slots for node in alive_nodes() if (slots := self._slots(node))}

    def _slots(self, node: Mapping[str, Any]) -> int:
        each = Resources(self.cpus_per_slot, self.gpus_per_slot if self.use_gpu else 0)
        return min(each.fits(node["Resources"]), LOCAL_RANKS_MAX)


def addresses() -> dict[str, str]:
    """Returns the address of each node that is alive, by Ray's ID of it."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in alive_nodes()}


def slots_of_nodes(discovery: Any, reported: set[str] | None = None) -> dict[str, int]:
    """Returns the slots of each node as a discovery finds them: `RayHostDiscovery`, or one of the program.

    A discovery of the program names a node by its address, by a resource `node:NAME` that it has, or by its host name.
    Slots of several names of one node are added. Other names are logged.

    reported -- names that were logged already, which are not logged again; new ones are added
    """
    # A subclass may replace either method; the most derived class decides.
    for kind in type(discovery).__mro__ if isinstance(discovery, RayHostDiscovery) else ():
        if "slots_of_nodes" in vars(kind):
            return dict(discovery.slots_of_nodes())
        if "find_available_hosts_and_slots" in vars(kind):
            break
    nodes = alive_nodes()
    known = _nodes_by_name(nodes)
    found: dict[str, int] = {}
    unknown = []
    for name, slots in discovery.find_available_hosts_and_slots().items():
        if name not in known:
            unknown.append(name)
        elif slots > 0:
            found[known[name]] = found.get(known[name], 0) + slots
    _report(unknown, nodes, set() if reported is None else reported)
    return found


def _nodes_by_name(nodes: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns Ray's ID of a node by each name that it has; of several nodes with a name, the first one."""
    by_address: dict[str, str] = {}
    by_resource: dict[str, str] = {}
    by_host: dict[str, str] = {}
    for node in nodes:
        number = node["NodeID"]
        by_address.setdefault(node["NodeManagerAddress"], number)
        for resource in node["Resources"]:
            if resource.startswith(_NODE_RESOURCE):
                by_resource.setdefault(resource[len(_NODE_RESOURCE) :], number)
        if host := node.get("NodeManagerHostname"):
            by_host.setdefault(host, number)
    return {**by_host, **by_resource, **by_address}


def _report(unknown: Iterable[str], nodes: Iterable[Mapping[str, Any]], reported: set[str]) -> None:
    """Logs names that no node has, each of them once."""
    names = sorted(set(unknown) - reported)
    if names:
        reported.update(names)
        _log.warning(
            "the discovery of the program names %s, and no node of Ray has this address, a resource node:NAME or this "
            "host name, so that these slots are not used; the nodes have the addresses %s",
            ", ".join(names),
            ", ".join(sorted({node["NodeManagerAddress"] for node in nodes})),
        )
