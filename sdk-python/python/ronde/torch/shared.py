"""Tensors in shared memory, which the sidecar reads without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from ronde.frameworks.basics import client

if TYPE_CHECKING:
    from collections.abc import Sequence


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Allocates an uninitialized tensor in shared memory.

    Submitting it, or a contiguous part of it, makes no copy (zero-copy): the sidecar reads it in place. Do not write to
    it until the operation completes: a call with `_async` returns before that. Otherwise it is like any other tensor.
    Its memory is released with the last view of it, even after `shutdown`.

    size  -- the dimensions, or one sequence of them
    dtype -- a type that collectives accept; default: PyTorch's default type

    Raises ValueError for another type, an invalid shape, and before `init`; RefusedError with cause "limit" if shared
    memory is full (`--arena-mb`).
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return cast(torch.Tensor, client().empty(cast("Sequence[int]", shape), dtype))
