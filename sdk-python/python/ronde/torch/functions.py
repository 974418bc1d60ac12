"""Broadcasts parameters and optimizer state, so that all ranks start from the same.

Nothing from the network is unpickled: the structure of a state is sent as JSON, its tensors as tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from ronde.frameworks import world
from ronde.frameworks.basics import client
from ronde.frameworks.process_sets import exchanged, global_process_set, members_of
from ronde.frameworks.window import Window
from ronde.torch import gradients, mpi_ops, optimizer_state
from ronde.torch.objects import broadcast_bytes
from ronde.torch.wrapping import made_gradient


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Broadcasts the parameters of rank `root_rank` to all ranks, in place.

    params    -- a `state_dict()`, or a list of tensors or of (name, tensor), with the same names, types and shapes on
                 all ranks; a list without names in the same order
    root_rank -- from 0 to size - 1

    Raises ValueError for anything else and a root out of range, and what `ronde.Client.broadcast` does. After an error
    only some parameters may be the root's.
    """
    window = Window()
    for name, tensor in named_tensors(params):
        submit = _in_place(tensor, root_rank, name)
        window.submit(tensor.numel() * tensor.element_size(), submit)
    window.finish()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Broadcasts the options and the state of rank `root_rank`'s optimizer to all ranks.

    Ranks that lack a state of the root get it, and state that the root does not have is dropped. No step is made to
    create state. If this rank's optimizer had no state, parameters without a gradient get one of zeros, as in Horovod;
    the distributed optimizer counts it as none.

    model -- identifies embeddings with sparse gradients, which some optimizers require

    Options and state may be dense and sparse (COO) tensors, numbers, strings, None, types of PyTorch and NumPy, scalars
    and arrays of NumPy, devices (each rank keeps its own), and lists, tuples and dictionaries of these. Receivers get
    sparse tensors coalesced. Everything but tensors is sent as JSON; nothing is unpickled.

    Raises ValueError for LBFGS and for a root out of range; on all ranks, if the root's optimizer has any other value,
    or if one rank's optimizer differs from the root's in the number of groups or parameters, or in the shape of a
    parameter. Also raises what `ronde.Client.broadcast` does.
    """
    had_state = bool(optimizer.state)
    description = optimizer_structure(optimizer, root_rank)
    window = Window()
    for name, tensor in optimizer_state.tensors_of(optimizer, description):
        window.submit(tensor.numel() * tensor.element_size(), _in_place(tensor, root_rank, name))
    window.finish()
    if not had_state:
        make_gradients(optimizer, model)


def optimizer_structure(optimizer: torch.optim.Optimizer, root_rank: int) -> dict[str, Any]:
    """Gives an optimizer the options and the structure of rank `root_rank`'s, and returns their description.

    New tensors are zeros, to be filled later. An optimizer that has the structure already keeps its tensors. Raises
    what `broadcast_optimizer_state` does.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state: it is nested and of varying size")
    is_root = mpi_ops.rank() == root_rank
    description: dict[str, Any] = optimizer_state.describe(optimizer) if is_root else {}
    description = _broadcast_json(description, root_rank, "optimizer_state.structure")
    if "error" in description:
        raise ValueError(description["error"])
    _check_alike(optimizer, description)
    if not is_root:
        optimizer_state.take(optimizer, description)
    return description


def _check_alike(optimizer: torch.optim.Optimizer, description: dict[str, Any]) -> None:
    """Raises ValueError on all ranks if one has another optimizer than the root, so that no rank waits for it."""
    mine = optimizer_state.difference(optimizer, description)
    members = members_of(global_process_set)
    everybodys = exchanged(client(), mine, "optimizer_state.differences", members)
    received = [f"rank {rank}: {text}" for rank, text in enumerate(everybodys) if text is not None]
    if received:
        raise ValueError(f"cannot broadcast the optimizer state, as optimizers differ; {'; '.join(received)}")


def make_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None = None) -> None:
    """Sets missing gradients to zeros, sparse ones where the optimizer or the model requires that."""
    modules = [] if model is None else list(model.modules())
    sparse = {
        each.weight for each in modules if isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and each.sparse
    }
    wants_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for parameter in optimizer_state.parameters_of(optimizer):
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = made_gradient(parameter, is_sparse=wants_sparse or parameter in sparse)


def named_tensors(params: Any) -> list[tuple[str | None, torch.Tensor]]:
    """Returns names and tensors as `broadcast_parameters` takes them, in the order in which it sends them."""
    if isinstance(params, Mapping):
        named: list[Any] = sorted(params.items())
    elif isinstance(params, list):
        named = [item if isinstance(item, tuple) else (None, item) for item in params]
    else:
        raise ValueError(f"invalid params of type: {type(params)}; give a dict or a list")
    named = [(name, tensor) for name, tensor in named if tensor is not None]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"invalid params: {name} is a {type(tensor).__name__}, not a tensor")
    return named


def _in_place(tensor: torch.Tensor, root_rank: int, name: str | None) -> Any:
    return lambda: _InPlace(gradients.begin_broadcast(tensor, root_rank, name, global_process_set, out=tensor))


class _InPlace:
    """A broadcast in flight, for a window to wait for."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def wait(self) -> None:
        world.synchronize(self._handle)


def _broadcast_json(value: Any, root_rank: int, name: str) -> Any:
    """Broadcasts a value that JSON can represent."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    received = broadcast_bytes(text if mpi_ops.rank() == root_rank else None, root_rank, name)
    return json.loads(bytes(received.tolist()).decode())
