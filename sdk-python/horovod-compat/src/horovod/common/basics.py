"""Horovod's basics object. Its methods are the functions that all frameworks share, so it needs none of them."""

from __future__ import annotations

from typing import Any

from ronde import ops
from ronde.frameworks import basics

_FUNCTIONS = (
    "init",
    "shutdown",
    "is_initialized",
    "start_timeline",
    "stop_timeline",
    "size",
    "max_size",
    "local_size",
    "cross_size",
    "rank",
    "local_rank",
    "cross_rank",
    "is_homogeneous",
    "mpi_threads_supported",
    "mpi_enabled",
    "mpi_built",
    "gloo_enabled",
    "gloo_built",
    "nccl_built",
    "ddl_built",
    "ccl_built",
    "cuda_built",
    "rocm_built",
)
_OPERATORS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
NAMES = (*_FUNCTIONS, *_OPERATORS)


class HorovodBasics:
    """Horovod's object with these functions and reduce operators.

    It accepts the name of a native library, as Horovod's does, and ignores it.
    """

    def __init__(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name not in NAMES:
            raise AttributeError(f"HorovodBasics has no {name}; it has {', '.join(NAMES)}")
        return getattr(ops if name in _OPERATORS else basics, name)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *NAMES]
