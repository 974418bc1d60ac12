"""What a pod is in its job: the arithmetic between the environment of a pod and the ranks and addresses of ronde.

Pure: the environment is an argument. `prepare.py` and `workers.py` use it in Kubernetes.

| variable | otherwise | what |
|---|---|---|
| RONDE_JOB | | the job's name |
| RONDE_NODES | PET_NNODES | the number of pods |
| RONDE_NODE | PET_NODE_RANK, then JOB_COMPLETION_INDEX | the index of this pod, from 0 |
| RONDE_WORKERS_PER_NODE | PET_NPROC_PER_NODE, then 1 | the number of workers in each pod |
| RONDE_HOSTS | | a pod's name in DNS, with `{}` in the place of its index: `train-node-0-{}.train` |
| RONDE_PORT | 7400 | the control port of each sidecar |

Kubeflow Trainer sets PET_*; the controller of indexed Jobs sets JOB_COMPLETION_INDEX.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

# Limits of ronde (docs/PROTOCOL.md).
SIDECARS_MAX = 1024
RANKS_MAX = 4096
LOCAL_RANKS_MAX = 64
PORT = "7400"
JOB_NAME = re.compile(r"[a-z0-9_.-]{1,63}")


class PodError(Exception):
    """The environment does not describe a pod of a job; the text says what to correct."""


@dataclasses.dataclass(frozen=True)
class Pod:
    """One pod of a job: a sidecar and its workers.

    index -- of this pod and its sidecar, from 0
    peers -- HOST:PORT of all sidecars, in the order of their indices; empty if RONDE_HOSTS is not set
    """

    job: str
    nodes: int
    index: int
    workers: int
    peers: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of ranks of the job."""
        return self.nodes * self.workers

    @property
    def ranks(self) -> range:
        """The ranks of this pod: blocks of equal size, in the order of pods, as torchrun numbers them."""
        return range(self.index * self.workers, (self.index + 1) * self.workers)

    @property
    def placement(self) -> list[int]:
        """For each rank, the index of its sidecar."""
        return [rank // self.workers for rank in range(self.size)]


def of_environment(environment: Mapping[str, str]) -> Pod:
    """Returns the pod that the variables describe.

    Raises PodError for a variable that is missing, no number or out of range.
    """
    job = environment.get("RONDE_JOB", "")
    if not JOB_NAME.fullmatch(job):
        raise PodError(
            f"RONDE_JOB is {job!r}; set it to the job's name: 1 to 63 characters of a-z, 0-9, '-', '_' and '.'"
        )
    nodes = _number(environment, ["RONDE_NODES", "PET_NNODES"], None, range(1, SIDECARS_MAX + 1))
    index = _number(environment, ["RONDE_NODE", "PET_NODE_RANK", "JOB_COMPLETION_INDEX"], None, range(nodes))
    names = ["RONDE_WORKERS_PER_NODE", "PET_NPROC_PER_NODE"]
    workers = _number(environment, names, "1", range(1, LOCAL_RANKS_MAX + 1))
    if nodes * workers > RANKS_MAX:
        raise PodError(f"{nodes} pods of {workers} workers are {nodes * workers} ranks; ronde has up to {RANKS_MAX}")
    hosts = environment.get("RONDE_HOSTS", "")
    if hosts and hosts.count("{}") != 1:
        raise PodError(
            f"RONDE_HOSTS is {hosts!r}; write {{}} once, in the place of the pod's index: train-node-0-{{}}.train"
        )
    port = _number(environment, ["RONDE_PORT"], PORT, range(1, 65536))
    peers = tuple(f"{hosts.replace('{}', str(peer))}:{port}" for peer in range(nodes)) if hosts else ()
    return Pod(job, nodes, index, workers, peers)


def _number(environment: Mapping[str, str], names: list[str], default: str | None, valid: range) -> int:
    """The first of these variables that is set."""
    found = next((name for name in names if environment.get(name)), None)
    text = environment[found] if found else default
    if text is None:
        raise PodError(f"none of {', '.join(names)} is set; see compose/kubernetes/README.md for the container's `env`")
    if not re.fullmatch(r"[0-9]{1,9}", text):
        hint = ""
        if found == "PET_NPROC_PER_NODE":
            hint = "; set numProcPerNode in the TrainJob, because a sidecar has to know how many workers come"
        raise PodError(f"{found} is {text!r}, which is not a whole number{hint}")
    if int(text) not in valid:
        limits = f"from {valid.start} to {valid.stop - 1}"
        raise PodError(f"{found or names[0]} is {text}; it must be a whole number {limits}")
    return int(text)
