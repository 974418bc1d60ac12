"""Elastic jobs on Ray, and a discovery for tests whose nodes come and go."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from horovod.ray.adapter import BaseParams, ExecutorAdapter
from ronde.ray.discovery import RayHostDiscovery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.ray.settings import MiniSettings

__all__ = ["ElasticAdapter", "ElasticParams", "RayHostDiscovery", "TestDiscovery"]


class ElasticAdapter(ExecutorAdapter):
    """Starts an elastic job for each call: `ElasticAdapter(settings, min_workers=2)`."""

    def __init__(self, settings: MiniSettings, min_workers: int, max_workers: int | None = None, **params: Any) -> None:
        super().__init__(settings, min_workers=min_workers, max_workers=max_workers, **params)


@dataclass
class ElasticParams(BaseParams):
    """The parameters of an elastic job, as for `RayExecutor`: `ElasticAdapter(settings, **params.named())`."""

    min_workers: int = 1
    max_workers: int | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[int] | None = None
    elastic_timeout: float = 600
    override_discovery: bool = True

    @property
    def elastic(self) -> bool:
        """True."""
        return True

    @property
    def adapter(self) -> type[ElasticAdapter]:
        """`ElasticAdapter`."""
        return ElasticAdapter


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
        _graceful: bool = True,
    ) -> None:
        del _graceful  # the launcher decides how workers of a node that has gone end
        super().__init__(use_gpu, cpus_per_slot, gpus_per_slot)
        self._min_hosts, self._max_hosts, self._period_s = min_hosts, max_hosts, change_frequency_s
        self._changed_at, self._removed = time.monotonic(), 0
        self.verbose = verbose

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """Returns the slots of the addresses that are there now."""
        return self._kept(super().find_available_hosts_and_slots())

    def slots_of_nodes(self) -> dict[str, int]:
        """Returns the slots of the nodes that are there now."""
        return self._kept(super().slots_of_nodes())

    def _kept(self, found: dict[str, int]) -> dict[str, int]:
        """Returns the entries that are there now, and changes their number when it is time."""
        if time.monotonic() - self._changed_at >= self._period_s:
            self._changed_at = time.monotonic()
            most = max(0, min(len(found), self._max_hosts) - self._min_hosts)
            self._removed = random.randint(0, most)
        kept = sorted(found)[: max(self._min_hosts, min(len(found), self._max_hosts) - self._removed)]
        return {name: found[name] for name in kept}
