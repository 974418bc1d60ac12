"""All-reduce of sparse tensors: all ranks gather all elements, and each adds those with equal indices."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Callable

import torch

from ronde.ops import Average, Sum
from ronde.submission import read_nothing, read_tensor
from ronde.torch.distributed.elements import as_elements, check_summed, input_of, resolved
from ronde.torch.distributed.uneven import dimension_of

if TYPE_CHECKING:
    from ronde.torch.distributed.ranks import Ranks, Start
    from ronde.torch.distributed.reductions import Reduction


def allreduce(ranks: Ranks, tensor: torch.Tensor, reduction: Reduction) -> tuple[Start, Callable[[Any], None]]:
    """Returns the start of the operation, and a function that replaces the tensor with the result.

    Raises NotImplementedError for reductions other than sum and average.
    """
    op = reduction.options["op"]
    if op not in (Sum, Average) or "prescale" in reduction.options:
        raise NotImplementedError("sparse tensors are reduced by SUM and AVG only; make it dense with to_dense()")
    base = tensor._base if tensor._is_view() else None
    if base is not None and base.is_complex():
        tensor = base  # PyTorch has made a real tensor of it, whose elements are not those of the complex one
    check_summed(tensor, reduction.is_sum)
    # Gradients of a sparse embedding are not coalesced; coalescing reduces their elements.
    mine = tensor.detach().coalesce()
    agreed = ("sparse", mine.sparse_dim(), tuple(mine.shape))
    nothing = input_of(torch.empty(0, dtype=torch.uint8), 0, dimension_of(agreed))
    check = ranks.tensor("allreduce", nothing, read_nothing, op=Sum)
    indices = input_of(mine.indices().t(), mine._nnz(), mine.sparse_dim())
    elements = as_elements(resolved(mine.values()))
    values = input_of(elements, mine._nnz(), math.prod(elements.shape[1:]))
    data = ranks.group("allgather", [indices, values], [read_tensor(indices), read_tensor(values)], True)

    def finish(results: list[torch.Tensor]) -> None:
        gathered, parts = results
        scale = ranks.size if op == Average else 1
        whole = _joined(mine, gathered, parts.view(-1, *elements.shape[1:]), scale)
        with torch.no_grad():
            tensor.copy_(whole)

    return ranks.checked(agreed, check, data), finish


def _joined(like: torch.Tensor, indices: torch.Tensor, elements: torch.Tensor, scale: int) -> torch.Tensor:
    """Returns all ranks' elements as one coalesced tensor."""
    values = torch.view_as_complex(elements) if like.is_complex() else elements
    whole = torch.sparse_coo_tensor(indices.t().to(like.device), values.to(like.device), like.shape).coalesce()
    if scale == 1:
        return whole
    mode = None if whole.is_floating_point() or whole.is_complex() else "trunc"
    means = torch.div(whole.values(), scale, rounding_mode=mode)
    return torch.sparse_coo_tensor(whole.indices(), means, like.shape, is_coalesced=True)
