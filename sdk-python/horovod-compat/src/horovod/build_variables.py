"""Horovod's variables for builds. `backend.py` runs this file before anything is installed, so it imports nothing."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_NAMES = re.compile(
    r"HOROVOD_(WITH(OUT)?_(TENSORFLOW|PYTORCH|MXNET|GLOO|MPI|NVTX)|GPU(_\w+)?|CPU_OPERATIONS|ALLOW_MIXED_GPU_IMPL"
    r"|CUDA_HOME|BUILD_(CUDA_CC_LIST|ARCH_FLAGS)|ROCM_(HOME|PATH)|NCCL_(HOME|INCLUDE|LIB|LINK)|CMAKE|DEBUG"
    r"|MPICXX_SHOW|SKIP_COMPILE|LOCAL_VERSION)"
)


def build_variables(names: Iterable[str]) -> list[str]:
    """Returns those of the names that are variables for builds of Horovod. None has an effect: nothing is compiled."""
    return sorted(name for name in names if _NAMES.fullmatch(name))
