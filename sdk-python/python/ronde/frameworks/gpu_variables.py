"""Horovod's variables about GPUs, which select what Horovod compiles: here they have no effect, and are named."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping

NAMES = (
    "HOROVOD_GPU",
    "HOROVOD_GPU_OPERATIONS",
    "HOROVOD_GPU_ALLREDUCE",
    "HOROVOD_GPU_ALLGATHER",
    "HOROVOD_GPU_BROADCAST",
    "HOROVOD_GPU_ALLTOALL",
    "HOROVOD_GPU_REDUCESCATTER",
    "HOROVOD_ALLOW_MIXED_GPU_IMPL",
)
_log = logging.getLogger("ronde")


def notes_of(variables: Mapping[str, str]) -> list[str]:
    """Returns a message for each of the variables that is set, with the reason and what to set instead."""
    return [
        f"{name}={variables[name]} has no effect: nothing is compiled for GPUs, and one release serves all of them. "
        "RONDE_GPU_STAGING and RONDE_GPU_LEVELS choose how their tensors travel (docs/GPU.md)"
        for name in NAMES
        if variables.get(name)
    ]


@functools.cache
def name_them() -> None:
    """Logs the messages, once in a process. For one rank of a job."""
    for note in notes_of(os.environ):
        _log.warning("%s", note)
