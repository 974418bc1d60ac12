"""Elastic jobs on Ray, and a discovery for tests whose nodes come and go."""

from __future__ import annotations

import random
import time

from ronde.ray.discovery import RayHostDiscovery
from ronde.ray.elastic import ElasticOptions as ElasticParams

__all__ = ["ElasticParams", "RayHostDiscovery", "TestDiscovery"]


class TestDiscovery(RayHostDiscovery):
    """Nodes that come and go every few seconds, between the given numbers of addresses and slots."""

    __test__ = False

    def __init__(
        self,
        min_hosts: int,
        max_hosts: int,
        change_frequency_s: float,
        use_gpu: bool = False,
        cpus_per_slot: float = 1,
        gpus_per_slot: float = 1,
        verbose: bool = True,
    ) -> None:
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)
        self._min_hosts, self._max_hosts, self._period_s = min_hosts, max_hosts, change_frequency_s
        self._changed_at, self._removed = time.monotonic(), 0
        self.verbose = verbose

    def slots_of_nodes(self) -> dict[str, int]:
        """Returns the slots of the nodes that are there now."""
        found = super().slots_of_nodes()
        if time.monotonic() - self._changed_at >= self._period_s:
            self._changed_at = time.monotonic()
            most = max(0, min(len(found), self._max_hosts) - self._min_hosts)
            self._removed = random.randint(0, most)
        kept = sorted(found)[: max(self._min_hosts, min(len(found), self._max_hosts) - self._removed)]
        return {node: found[node] for node in kept}
