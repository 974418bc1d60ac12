"""Memory of GPUs for PyTorch's tensors that a sidecar started with `--gpu` reads in place."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from ronde import _ronde

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def gpu_pool() -> Iterator[Any]:
    """Allocates tensors on GPUs in memory that ronde can share with the sidecar, while the context is open.

        with ronde.torch.gpu_pool():
            flat = torch.zeros(parameters, device="cuda")

    Use it for gradients and buffers that are submitted in each step: they are then reduced without a copy into shared
    memory. Other tensors are copied within the GPU first. Memory of the pool is used again for later tensors of the
    pool, and the sidecar keeps what it has got until the session ends, up to `--arena-mb`.

    Yields the `torch.cuda.MemPool`. Raises RuntimeError if this PyTorch has no pools (before 2.5) or no CUDA.
    """
    import torch

    pool = _pool()
    with torch.cuda.use_mem_pool(pool):
        yield pool


@functools.cache
def _pool() -> Any:
    """Returns the pool of this process, and keeps its allocator."""
    import torch

    if not torch.cuda.is_available() or not hasattr(torch.cuda, "MemPool"):
        raise RuntimeError(
            f"PyTorch {torch.__version__} has no memory pools on GPUs here; install one from 2.5 on for CUDA, on a "
            "host with a GPU"
        )
    allocator = torch.cuda.memory.CUDAPluggableAllocator(_ronde.__file__, "ronde_gpu_malloc", "ronde_gpu_free")
    # The attribute was renamed.
    native = getattr(allocator, "allocator", None)
    pool = torch.cuda.MemPool(native() if callable(native) else allocator._allocator)
    _KEPT.append(allocator)
    return pool


# Allocators must outlive their memory.
_KEPT: list[Any] = []
