"""Reductions of sparse tensors, by gathering all ranks' elements and adding those with equal indices."""

from __future__ import annotations

from typing import Callable

import torch

from ronde.frameworks import world
from ronde.frameworks.process_sets import ProcessSet, global_process_set, size_of
from ronde.ops import Average, Sum
from ronde.torch import gradients


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Starts the sum or average of all ranks' sparse tensors. The returned function waits for the result.

    tensor -- of layout COO, the same type, shape and number of sparse dimensions on all ranks; any number of elements
    name   -- identifies the operation on all ranks
    op     -- Average or Sum

    The result is coalesced. Raises ValueError for other tensors and reductions. The function raises what `synchronize`
    does.
    """
    if tensor.layout != torch.sparse_coo:
        raise ValueError(f"sparse_allreduce_async takes tensors of layout torch.sparse_coo, not {tensor.layout}")
    if op not in (Average, Sum):
        raise ValueError("sparse_allreduce_async supports op=Average and op=Sum only")
    coalesced = tensor.detach().coalesce()
    indices, values = coalesced.indices(), coalesced.values()
    # Gather rows, one for each element.
    index_handle = gradients.begin_allgather(indices.t().contiguous(), f"{name}.indices", process_set)
    value_handle = gradients.begin_allgather(values, f"{name}.values", process_set)
    shape, ranks = tensor.shape, size_of(process_set)

    def finish() -> torch.Tensor:
        gathered = world.synchronize(value_handle)
        where = world.synchronize(index_handle)
        if op == Average:
            gathered = gathered / ranks
        # Indices of other ranks are untrusted input; check them before they address memory.
        return torch.sparse_coo_tensor(where.t(), gathered, shape, check_invariants=True).coalesce()

    return finish
