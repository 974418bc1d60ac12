"""Tensors in shared memory, which the sidecar reads where they lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from ronde.torch.basics import client

if TYPE_CHECKING:
    from collections.abc import Sequence


def empty(*size: int | Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor in shared memory, whose elements are any, as those of `torch.empty` are.

    The sidecar reads what is submitted from there, or from a part of it in one piece, where it lies: nothing is copied,
    and so nobody may write there until the operation is complete, also not after the call of a form with `_async`. The
    tensor is like others otherwise. Its memory is given back when the last view of it dies, also after `shutdown`.

    size  -- the dimensions, or one sequence of them
    dtype -- a type that collectives take; PyTorch's default without it

    Raises ValueError for another type, for what is no shape, and before `init`; RefusedError with cause "limit" where
    shared memory has no room (`--arena-mb`).
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return cast(torch.Tensor, client().empty(cast("Sequence[int]", shape), dtype))
