"""Conversion of reductions of `torch.distributed` to those of ronde."""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple

import torch
from torch.distributed import ReduceOp

from ronde.ops import Average, BitAnd, BitOr, BitXor, Max, Min, Product, Sum


class Reduction(NamedTuple):
    """A reduction of elements of several ranks.

    options -- options of the submission
    is_sum  -- whether complex numbers are reduced as pairs of real ones
    of_rows -- the same reduction on one rank, of the rows of a tensor
    """

    options: dict[str, Any]
    is_sum: bool
    of_rows: Callable[[torch.Tensor], torch.Tensor]


def of(opts: Any) -> Reduction:
    """Returns the reduction of a call. Raises NotImplementedError for an unsupported one."""
    given = ReduceOp(ReduceOp.SUM) if opts is None else opts.reduceOp
    op = given.op
    if op == ReduceOp.PREMUL_SUM:
        return _scaled_sum(given)
    found = _REDUCTIONS.get(op)
    if found is None:
        names = ", ".join(str(op).partition(".")[2] for op in _REDUCTIONS)
        raise NotImplementedError(f"the backend ronde reduces by {names} and PREMUL_SUM, not by {op}")
    return found


def _scaled_sum(given: Any) -> Reduction:
    factor = getattr(given, "factor", None)
    if factor is None:
        raise NotImplementedError("PREMUL_SUM needs a PyTorch whose ReduceOp has a factor; multiply before the call")
    scale = float(factor)
    return Reduction({"op": Sum, "prescale": scale}, True, lambda rows: _widely(rows * scale, torch.sum))


def _widely(rows: torch.Tensor, reduce: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Reduces the rows of small floating-point types in float32, and rounds once."""
    wide = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
    return reduce(wide, dim=0).to(rows.dtype)


def _mean(rows: torch.Tensor) -> torch.Tensor:
    if rows.is_floating_point():
        return _widely(rows, torch.mean)
    return torch.div(rows.sum(dim=0), len(rows), rounding_mode="trunc").to(rows.dtype)


def _by_twos(operator: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the reduction of rows by an operator on two tensors."""
    return lambda rows: functools.reduce(operator, rows.unbind())


_REDUCTIONS: dict[Any, Reduction] = {
    ReduceOp.SUM: Reduction({"op": Sum}, True, lambda rows: _widely(rows, torch.sum)),
    ReduceOp.AVG: Reduction({"op": Average}, True, _mean),
    ReduceOp.PRODUCT: Reduction({"op": Product}, False, lambda rows: _widely(rows, torch.prod)),
    ReduceOp.MIN: Reduction({"op": Min}, False, lambda rows: rows.amin(dim=0)),
    ReduceOp.MAX: Reduction({"op": Max}, False, lambda rows: rows.amax(dim=0)),
    ReduceOp.BAND: Reduction({"op": BitAnd}, False, _by_twos(torch.bitwise_and)),
    ReduceOp.BOR: Reduction({"op": BitOr}, False, _by_twos(torch.bitwise_or)),
    ReduceOp.BXOR: Reduction({"op": BitXor}, False, _by_twos(torch.bitwise_xor)),
}
