"""The job of ronde as a cluster environment of Lightning."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.fabric.plugins.environments import ClusterEnvironment

import ronde_entry_points
from ronde import _ronde
from ronde.errors import RondeError
from ronde.torch.distributed import creation

if TYPE_CHECKING:
    from collections.abc import Mapping


class Place(NamedTuple):
    """A process among those of its job.

    rank, size             -- among all
    local_rank, local_size -- among those of its host
    node                   -- the number of its host
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int


def place(environment: Mapping[str, str]) -> Place | None:
    """Returns the place that a launcher's variables give this process; without a launcher it is alone.

    Returns None where the variables name a job of ronde or a sidecar, but not the number of ranks: the scripts for
    Slurm, Kubernetes and compose set no more, and only the session knows. Beside a sidecar, the variables of another
    launcher are used if RONDE_RANK is not set.

    Raises RondeError with cause "settings" if a launcher's variables are incomplete: each process would train alone.
    """
    launched = _ronde.LaunchedBy.detect(dict(environment))
    is_served = any(environment.get(name) for name in ("RONDE_SOCKET", "RONDE_JOB", "RONDE_RANK"))
    if is_served and (launched is None or (environment.get("RONDE_RANK") and not environment.get("RONDE_SIZE"))):
        return None
    if launched is None:
        return Place(0, 1, 0, 1, 0)
    rank, size, local_rank, local_size = launched.rank, launched.size, launched.local_rank, launched.local_size
    if rank is None or size is None or local_rank is None:
        raise RondeError(
            f"{launched.launcher} has started this process, but not all of its rank, its rank on the host and the "
            "number of processes are in the environment; start the program by `ronde run -np N`",
            "settings",
        )
    node = int(environment.get("RONDE_CROSS_RANK") or 0) if launched.node is None else launched.node
    return Place(rank, size, local_rank, local_size or size, node)


def place_in_session() -> Place:
    """Returns the place in the session, which begins here if necessary. Raises what `ronde.torch.init` does."""
    client = creation.begun({}).client
    return Place(client.rank, client.size, client.local_rank, client.local_size, client.cross_rank)


class RondeEnvironment(ClusterEnvironment):  # type: ignore[misc]
    """Ranks and sizes of the job that `ronde run`, or another launcher, has started: one process for each device.

    Where the environment lacks them (Slurm, Kubernetes, compose), it begins the session and takes them from there.
    Raises RondeError where `place` and `place_in_session` do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.place = place(os.environ) or place_in_session()

    def check(self, rank: int, size: int) -> None:
        """Raises RondeError with cause "settings" if a session has another rank or size: data is shared by these."""
        if (rank, size) != (self.place.rank, self.place.size):
            raise RondeError(
                f"the environment of this process gives rank {self.place.rank} of {self.place.size}, by which "
                f"Lightning shares the data, but its session is rank {rank} of {size}. Start the program by "
                f"`ronde run -np {size}`, or unset the variables of the launcher that does not start this job",
                "settings",
            )

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning must start none."""
        return True

    @property
    def main_address(self) -> str:
        """The address in MASTER_ADDR, else the loopback's. The backend "ronde" does not use it."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """The port in MASTER_PORT, else PyTorch's default. The backend "ronde" does not use it."""
        return int(os.environ.get("MASTER_PORT", "29500"))

    @staticmethod
    def detect() -> bool:
        """Returns whether a job of ronde has started this process."""
        return ronde_entry_points.is_in_job(os.environ)

    def world_size(self) -> int:
        """The number of processes of the job."""
        return self.place.size

    def set_world_size(self, size: int) -> None:
        """Does nothing: the launcher has set it."""

    def global_rank(self) -> int:
        """The number of this process in the job."""
        return self.place.rank

    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the launcher has set it."""

    def local_rank(self) -> int:
        """The number of this process on its host."""
        return self.place.local_rank

    def local_size(self) -> int:
        """The number of processes on this host."""
        return self.place.local_size

    def node_rank(self) -> int:
        """The number of the host."""
        return self.place.node

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raises ValueError if the Trainer's `devices` and `num_nodes` contradict the job.

        `devices=1` always fits, and is Lightning's default on CPUs: a process has one device.
        """
        if num_devices != 1 and num_devices * num_nodes != self.place.size:
            raise ValueError(
                f"the Trainer is to use devices={num_devices} and num_nodes={num_nodes}, but this job has "
                f"{self.place.size} processes with one device each. Leave both out of the Trainer, and start "
                f"`ronde run -np {num_devices * num_nodes}` for as many processes"
            )

    def device(self, devices: list[torch.device]) -> torch.device:
        """Returns the device of this process.

        devices -- those that the Trainer uses: one for each process of the host, or a single one of their kind
        """
        if len(devices) == 1 and devices[0].type != "cpu":
            return torch.device(devices[0].type, self.place.local_rank)
        return devices[self.place.local_rank % len(devices)]


class PlacedByJob:
    """What strategies take from the job instead of from the Trainer's `devices` and `num_nodes`."""

    job: RondeEnvironment
    parallel_devices: list[torch.device] | None

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        return self.job.device(self.parallel_devices or [torch.device("cpu")])

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of shards of the data and which of them this process has."""
        return {"num_replicas": self.job.world_size(), "rank": self.job.global_rank()}
