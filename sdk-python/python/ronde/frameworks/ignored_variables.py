"""Horovod's variables that have no effect here. `init` names those that are set, so that nobody relies on one.

Variables for builds that say nothing about a run, such as HOROVOD_WITH_PYTORCH, are named by
`horovodrun --check-build` only.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, NamedTuple

from ronde.frameworks import hierarchy

if TYPE_CHECKING:
    from collections.abc import Mapping

_log = logging.getLogger("ronde")


class Ignored(NamedTuple):
    """Why a variable has no effect, and what to set instead.

    accepted -- values, in lower case, that request what ronde does in any case
    """

    reason: str
    accepted: tuple[str, ...] = ()


_MIGRATING = "(docs/MIGRATING.md)"
_BUILT = Ignored(
    "nothing is compiled for GPUs, and one release serves all of them. RONDE_GPU_STAGING and RONDE_GPU_LEVELS choose "
    "how their tensors travel (docs/GPU.md)"
)
_ON_GPUS = Ignored("RONDE_GPU_STAGING and RONDE_GPU_LEVELS choose how tensors on GPUs travel (docs/GPU.md)")
_NO_ONECCL = "sidecars do what oneCCL does in Horovod"
_BY_SPARK = Ignored(
    "the ranks have the paths and the folder of their Spark tasks, and `ronde.spark.run(env=...)` sets variables "
    "(docs/SPARK.md)"
)
IGNORED = {
    "HOROVOD_GPU": _BUILT,
    "HOROVOD_GPU_OPERATIONS": _BUILT,
    "HOROVOD_GPU_ALLREDUCE": _BUILT,
    "HOROVOD_GPU_ALLGATHER": _BUILT,
    "HOROVOD_GPU_BROADCAST": _BUILT,
    "HOROVOD_GPU_ALLTOALL": _BUILT,
    "HOROVOD_GPU_REDUCESCATTER": _BUILT,
    "HOROVOD_ALLOW_MIXED_GPU_IMPL": _BUILT,
    "HOROVOD_BATCH_D2D_MEMCOPIES": _ON_GPUS,
    "HOROVOD_ENABLE_ASYNC_COMPLETION": _ON_GPUS,
    "HOROVOD_NUM_NCCL_STREAMS": Ignored(f"each set of ranks has one NCCL communicator {_MIGRATING}"),
    # `horovodrun` sets both to gloo in every job.
    "HOROVOD_CONTROLLER": Ignored(f"sidecars control every job {_MIGRATING}", ("gloo",)),
    "HOROVOD_CPU_OPERATIONS": Ignored(f"sidecars perform the operations of all jobs {_MIGRATING}", ("gloo",)),
    "HOROVOD_CCL_CACHE": Ignored(f"{_NO_ONECCL} {_MIGRATING}", ("0",)),
    "HOROVOD_CCL_BGT_AFFINITY": Ignored(
        f"{_NO_ONECCL}; HOROVOD_THREAD_AFFINITY sets the cores of a sidecar's threads {_MIGRATING}"
    ),
    "HOROVOD_GLOO_TIMEOUT_SECONDS": Ignored(f"there is no Gloo; HOROVOD_START_TIMEOUT bounds the start {_MIGRATING}"),
    "HOROVOD_CYCLE_TIME": Ignored(f"nothing waits for the end of a cycle {_MIGRATING}"),
    "HOROVOD_HIERARCHICAL_ALLGATHER": Ignored(
        f"each rank's tensor goes once to every other host in any case {_MIGRATING}", ("0",)
    ),
    "HOROVOD_TORUS_ALLREDUCE": Ignored(f"there is no such algorithm {_MIGRATING}", ("0",)),
    "HOROVOD_DISABLE_GROUP_FUSION": Ignored(
        f"tensors of a group are fused as others are; HOROVOD_FUSION_THRESHOLD=0 switches fusion off {_MIGRATING}",
        ("0",),
    ),
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": Ignored(
        f"Adasum does not go through MPI; --chunk-bytes sets the size of the chunks of all operations {_MIGRATING}"
    ),
    "HOROVOD_SPARK_PYTHONPATH": _BY_SPARK,
    "HOROVOD_SPARK_WORK_DIR": _BY_SPARK,
}


def notes_of(variables: Mapping[str, str]) -> list[str]:
    """Returns a message for each of the variables that is set, with the reason and what to set instead."""
    return [
        f"{name}={value} has no effect: {ignored.reason}"
        for name, ignored in IGNORED.items()
        if (value := variables.get(name)) and value.lower() not in ignored.accepted
    ]


@functools.cache
def name_them() -> None:
    """Logs the messages, once in a process. For one rank of a job."""
    for note in [*notes_of(os.environ), *hierarchy.notes()]:
        _log.warning("%s", note)
