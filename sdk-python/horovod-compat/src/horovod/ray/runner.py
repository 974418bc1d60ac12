"""`RayExecutor`, its parameters for a fixed number of workers, and the class by which Horovod numbers its ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from horovod.ray.adapter import BaseParams, ExecutorAdapter
from ronde.ray import RayExecutor
from ronde.ray.settings import MiniSettings

__all__ = ["Coordinator", "MiniSettings", "RayExecutor", "StaticAdapter", "StaticParams"]


class StaticAdapter(ExecutorAdapter):
    """Starts a fixed number of workers: `StaticAdapter(settings, num_workers=4)`."""

    def __init__(
        self,
        settings: MiniSettings,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: float = 1,
        use_gpu: bool = False,
        gpus_per_worker: float | None = None,
        use_current_placement_group: bool = True,
    ) -> None:
        super().__init__(
            settings,
            num_workers=num_workers,
            num_hosts=num_hosts,
            num_workers_per_host=num_workers_per_host,
            cpus_per_worker=cpus_per_worker,
            use_gpu=use_gpu,
            gpus_per_worker=gpus_per_worker,
            use_current_placement_group=use_current_placement_group,
        )


@dataclass
class StaticParams(BaseParams):
    """The parameters of a fixed number of workers: `StaticAdapter(settings, **params.named())`."""

    num_workers: int | None = None
    num_hosts: int | None = None
    num_workers_per_host: int = 1
    use_current_placement_group: bool = True

    @property
    def elastic(self) -> bool:
        """False."""
        return False

    @property
    def adapter(self) -> type[StaticAdapter]:
        """`StaticAdapter`."""
        return StaticAdapter


class Coordinator:
    """Numbers ranks within and across hosts. `RayExecutor` does not need it; programs that start actors themselves may.

    settings -- kept
    """

    def __init__(self, settings: MiniSettings) -> None:
        self.settings = settings
        self.hostnames_by_rank: dict[str, list[int]] = defaultdict(list)
        self.node_id_by_rank: dict[str, list[int]] = defaultdict(list)

    @property
    def world_size(self) -> int:
        """The number of registered ranks."""
        return sum(len(ranks) for ranks in self.node_id_by_rank.values())

    @property
    def hoststring(self) -> str:
        """The hosts and the number of their ranks, such as "alpha:2,beta:2"."""
        return ",".join(f"{host}:{len(ranks)}" for host, ranks in self.hostnames_by_rank.items())

    def register(self, hostname: str, node_id: str, world_rank: int) -> None:
        """Adds a rank of a node."""
        self.hostnames_by_rank[hostname].append(world_rank)
        self.node_id_by_rank[node_id].append(world_rank)

    def finalize_registration(self) -> dict[int, dict[str, int]]:
        """Returns for each rank the variables HOROVOD_CROSS_RANK, _CROSS_SIZE, _LOCAL_RANK and _LOCAL_SIZE.

        The first two number the nodes that have a rank with this local rank, in the order of their registration.
        """
        found = {}
        nodes = list(self.node_id_by_rank.values())
        for node, ranks in enumerate(nodes):
            for local, rank in enumerate(ranks):
                across = [index for index, others in enumerate(nodes) if len(others) > local]
                found[rank] = {
                    "HOROVOD_CROSS_RANK": across.index(node),
                    "HOROVOD_CROSS_SIZE": len(across),
                    "HOROVOD_LOCAL_RANK": local,
                    "HOROVOD_LOCAL_SIZE": len(ranks),
                }
        return found
