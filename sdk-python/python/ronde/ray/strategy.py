"""Where the actors of an executor run: placement groups of Ray, one bundle for each worker or for each host."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import ray
from ray.util.placement_group import get_current_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ronde.ray.nodes import alive_nodes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Bundle = dict[str, float]

_log = logging.getLogger("ronde.ray")
# After this time without a place a message says what is missing, and again after as long.
_REPORT_S = 10.0
_POLL_S = 0.5


class Resources(NamedTuple):
    """What a worker needs: CPUs, and GPUs."""

    cpus: float = 1
    gpus: float = 0

    def bundle(self, workers: int = 1) -> Bundle:
        """Returns the resources of some workers, as Ray names them."""
        gpus = {"GPU": self.gpus * workers} if self.gpus else {}
        return {"CPU": self.cpus * workers, **gpus}

    def fits(self, available: Mapping[str, float]) -> int:
        """Returns how many workers fit into these resources."""
        needed = {name: amount for name, amount in self.bundle().items() if amount > 0}
        counts = [int((available.get(name, 0) + 1e-9) / amount) for name, amount in needed.items()]
        return min(counts) if counts else _UNLIMITED

    def described(self) -> str:
        """Returns the resources for a message."""
        return " and ".join(f"{amount:g} {name}" for name, amount in self.bundle().items())


_UNLIMITED = 1_000_000


class Strategy(Protocol):
    """Reserves places for workers and makes actors there."""

    num_workers: int

    def create_workers(self, kind: Any, timeout: float) -> list[Any]:
        """Makes the actors, with the class `kind` of Ray. Raises TimeoutError if there are too few places."""

    def shutdown(self) -> None:
        """Gives the places back."""


def create_placement_group(
    resources_per_bundle: Mapping[str, float],
    num_bundles: int,
    pg_timeout: float,
    pg_strategy: str,
    workers_per_bundle: int = 1,
) -> tuple[Any, list[Bundle]]:
    """Reserves bundles of equal resources, and waits until Ray has them.

    resources_per_bundle -- such as {"CPU": 2}
    num_bundles          -- how many
    pg_timeout           -- seconds to wait
    pg_strategy          -- "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD"
    workers_per_bundle   -- for messages

    Returns the placement group and its bundles. Raises TimeoutError with the numbers of wanted and possible workers.
    """
    bundle = dict(resources_per_bundle)
    bundles = [dict(bundle) for _ in range(num_bundles)]
    group = placement_group(bundles, strategy=pg_strategy)
    try:
        _wait(group, _Wanted(bundle, num_bundles, workers_per_bundle, pg_strategy), pg_timeout)
    except BaseException:
        remove_placement_group(group)
        raise
    return group, bundles


class _Wanted(NamedTuple):
    bundle: Mapping[str, float]
    bundles: int
    workers_per_bundle: int
    strategy: str

    def described(self) -> str:
        """Returns what is wanted and what the cluster has, for a message."""
        each = " and ".join(f"{amount:g} {name}" for name, amount in self.bundle.items())
        per_node = [
            min((int((node["Resources"].get(name, 0) + 1e-9) / amount) for name, amount in self._needed()), default=0)
            for node in alive_nodes()
        ]
        possible = sum(map(bool, per_node)) if self.strategy == "STRICT_SPREAD" else sum(per_node)
        free = ray.available_resources()
        has = " and ".join(f"{free.get(name, 0):g} {name}" for name in self.bundle)
        what = "workers" if self.strategy != "STRICT_SPREAD" else f"hosts for {self.workers_per_bundle} workers each"
        return (
            f"{self.bundles} {what} are wanted, with {each} each. The {len(per_node)} nodes of the cluster have slots "
            f"for {possible}; {has} are free now"
        )

    def _needed(self) -> list[tuple[str, float]]:
        return [(name, amount) for name, amount in self.bundle.items() if amount > 0]


def _wait(group: Any, wanted: _Wanted, timeout: float) -> None:
    begun = time.monotonic()
    reported = begun
    while True:
        rest = begun + timeout - time.monotonic()
        if group.wait(max(min(rest, _POLL_S), 0.0)):
            return
        if rest <= 0:
            raise TimeoutError(
                f"Ray has not reserved the places of the workers within {timeout:g} s: {wanted.described()}. Ask for "
                "fewer workers, add nodes, end what uses the others, or raise placement_group_timeout_s"
            )
        if time.monotonic() - reported >= min(_REPORT_S, timeout / 2):
            reported = time.monotonic()
            _log.warning("waiting for places of workers, for up to %.0f s more: %s", rest, wanted.described())


class PGStrategy:
    """Places for a number of workers, on as few nodes as possible.

    settings                    -- with `placement_group_timeout_s`
    num_workers                 -- how many
    use_gpu                     -- whether each needs GPUs
    cpus_per_worker             -- CPUs for each
    gpus_per_worker             -- GPUs for each; default: 1 if `use_gpu`, else 0
    use_current_placement_group -- whether workers run in the placement group of the caller, an actor or task, if any
    """

    def __init__(
        self,
        settings: Any,
        num_workers: int,
        use_gpu: bool = False,
        cpus_per_worker: float = 1,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
    ) -> None:
        self.settings, self.num_workers = settings, num_workers
        self.resources = resources_of(cpus_per_worker, use_gpu, gpus_per_worker)
        self.placement_group = get_current_placement_group() if use_current_placement_group else None
        self._is_own = self.placement_group is None

    def create_workers(self, kind: Any, timeout: float | None = None) -> list[Any]:
        """Makes the actors.

        Raises TimeoutError if there are too few places, and ValueError if the current placement group has too few.
        """
        indices: Sequence[int]
        if self._is_own:
            wait = self.settings.placement_group_timeout_s if timeout is None else timeout
            self.placement_group, _ = create_placement_group(self.resources.bundle(), self.num_workers, wait, "PACK")
            indices = range(self.num_workers)
        else:
            self._check_capacity()
            # Any bundle with room: the first one may be that of the calling actor.
            indices = [-1] * self.num_workers
        return [_actor(kind, self.placement_group, index, self.resources, self.num_workers) for index in indices]

    def _check_capacity(self) -> None:
        bundles = self.placement_group.bundle_specs if self.placement_group else []
        fitting = sum(self.resources.fits(bundle) for bundle in bundles)
        if fitting < self.num_workers:
            raise ValueError(
                f"{self.num_workers} workers with {self.resources.described()} each do not fit into the current "
                f"placement group, which has room for {fitting} of them ({bundles}); give it more bundles, or set "
                "use_current_placement_group=False"
            )

    def shutdown(self) -> None:
        """Removes the placement group, if this made it."""
        if self._is_own and self.placement_group is not None:
            remove_placement_group(self.placement_group)
            self.placement_group = None


class ColocatedStrategy:
    """Places on a number of hosts, with equally many workers on each.

    settings                                  -- with `placement_group_timeout_s`
    num_hosts, num_workers_per_host           -- how many
    use_gpu, cpus_per_worker, gpus_per_worker -- as for `PGStrategy`
    """

    def __init__(
        self,
        settings: Any,
        num_hosts: int,
        num_workers_per_host: int,
        use_gpu: bool = False,
        cpus_per_worker: float = 1,
        gpus_per_worker: float | None = None,
    ) -> None:
        self.settings, self.num_hosts, self.num_workers_per_host = settings, num_hosts, num_workers_per_host
        self.num_workers = num_hosts * num_workers_per_host
        self.resources = resources_of(cpus_per_worker, use_gpu, gpus_per_worker)
        self.placement_group: Any = None

    def create_workers(self, kind: Any, timeout: float | None = None) -> list[Any]:
        """Makes the actors. Raises TimeoutError if there are too few hosts with enough room."""
        each = self.num_workers_per_host
        self.placement_group, _ = create_placement_group(
            self.resources.bundle(each),
            self.num_hosts,
            self.settings.placement_group_timeout_s if timeout is None else timeout,
            "STRICT_SPREAD",
            each,
        )
        bundles = [bundle for bundle in range(self.num_hosts) for _ in range(each)]
        return [_actor(kind, self.placement_group, bundle, self.resources, self.num_workers) for bundle in bundles]

    def shutdown(self) -> None:
        """Removes the placement group."""
        if self.placement_group is not None:
            remove_placement_group(self.placement_group)
            self.placement_group = None


def resources_of(cpus: float, use_gpu: bool, gpus: float | None) -> Resources:
    """Returns what each worker needs: one GPU if `use_gpu` says so without a number."""
    return Resources(cpus, (1 if gpus is None else gpus) if use_gpu else 0)


def _actor(kind: Any, group: Any, bundle: int, resources: Resources, size: int) -> Any:
    placed = PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=False
    )
    options = {"num_cpus": resources.cpus, "num_gpus": resources.gpus, "scheduling_strategy": placed}
    return kind.options(**options).remote(world_size=size)
