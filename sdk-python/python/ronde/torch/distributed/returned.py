"""Makes PyTorch return the operations that a backend in Python begins.

PyTorch calls such a backend through C++ and returns a wrapper of its operation, which passes on `wait` and `get_future`
only: it never says that the operation is complete, and has no result, error or sender. So functions of a process group
return the operation itself, if it is one of ronde. Other operations pass unchanged.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
import torch.distributed

from ronde.torch.distributed.base import begun
from ronde.torch.distributed.elements import is_lazy
from ronde.torch.distributed.group import group_of

# Functions of a process group that return operations; the older names and the newer ones.
_FUNCTIONS = [
    "_allgather_base",
    "_end_coalescing",
    "_reduce_scatter_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "gather_into_tensor",
    "gather_single",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
]

# Of these, those that C++ does not call in a backend in Python.
_NOT_BY_CPP = ("gather_single", "gather_into_tensor")


@functools.cache
def return_operations() -> None:
    """Replaces these functions of PyTorch's class, once."""
    group: Any = torch.distributed.ProcessGroup
    for name in _FUNCTIONS:
        if hasattr(group, name):
            setattr(group, name, _returning(getattr(group, name), name))


def _is_any_lazy(arguments: Any) -> bool:
    """Returns whether a tensor is a conjugated or negated view.

    On the way through C++ it would be replaced with a copy, in which the result would be lost.
    """
    for each in arguments:
        if isinstance(each, torch.Tensor):
            if is_lazy(each):
                return True
        elif isinstance(each, (list, tuple)) and _is_any_lazy(each):
            return True
    return False


def _returning(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    is_direct = name in _NOT_BY_CPP

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        if (is_direct or _is_any_lazy(arguments)) and (group := group_of(self)) is not None:
            return getattr(group, name)(*arguments, **options)
        outer = begun.record()
        try:
            result = function(self, *arguments, **options)
            return result if begun.work is None else begun.work
        finally:
            begun.restore(outer)

    # For a group that is written in Python and lacks the function, C++ finds this one in its place. It knows by the
    # code's name and by the first argument of the frame that calls it that this one has called it.
    call.__code__ = call.__code__.replace(co_name=name)
    return functools.wraps(function)(call)
