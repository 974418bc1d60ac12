"""The nodes of the cluster as hosts of an elastic job, with a number of slots each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray

from ronde.own_sidecar import LOCAL_RANKS_MAX
from ronde.ray.strategy import Resources

if TYPE_CHECKING:
    from collections.abc import Mapping


class RayHostDiscovery:
    """Finds the nodes of the cluster, and how many workers fit on each.

    use_gpu                      -- whether workers have GPUs
    cpus_per_slot, gpus_per_slot -- processors and GPUs for each
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


def alive_nodes() -> list[Mapping[str, Any]]:
    """Returns the entries of Ray's table of nodes for those that are alive."""
    return [node for node in ray.nodes() if node["Alive"]]


def addresses() -> dict[str, str]:
    """Returns the address of each node that is alive, by Ray's ID of it."""
    return {node["NodeID"]: node["NodeManagerAddress"] for node in alive_nodes()}


def slots_of_nodes(discovery: Any) -> dict[str, int]:
    """Returns the slots of each node as a discovery finds them: `RayHostDiscovery`, or one that names addresses."""
    own = RayHostDiscovery.find_available_hosts_and_slots
    # A subclass may replace either method.
    if isinstance(discovery, RayHostDiscovery) and type(discovery).find_available_hosts_and_slots is own:
        return discovery.slots_of_nodes()
    first = {address: node for node, address in reversed(list(addresses().items()))}
    found = discovery.find_available_hosts_and_slots()
    return {first[address]: slots for address, slots in found.items() if address in first and slots > 0}
