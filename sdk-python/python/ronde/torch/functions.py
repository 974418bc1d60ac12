"""Making all ranks start from the same parameters and optimizer state.

Nothing that comes over the network is unpickled: the structure of a state travels as JSON, its tensors as tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ronde.torch import gradients, mpi_ops, world
from ronde.torch.objects import broadcast_bytes
from ronde.torch.process_sets import global_process_set
from ronde.torch.window import Window


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Gives all ranks the parameters of rank `root_rank`, in place.

    params    -- a `state_dict()`, or a list of tensors or of (name, tensor), with the same names, types and shapes on
                 all ranks; a list without names in the same order
    root_rank -- from 0 to size - 1

    Raises ValueError for anything else and a root out of range, and what `ronde.Client.broadcast` does. Parameters are
    in part the root's after an error.
    """
    window = Window()
    for name, tensor in _named(params):
        submit = _in_place(tensor, root_rank, name)
        window.submit(tensor.numel() * tensor.element_size(), submit)
    window.finish()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Gives all ranks the options and the state of rank `root_rank`'s optimizer.

    A state that is missing is made by one step of the wrapped optimizer with gradients of zero, which changes no
    parameter and counts no step; the gradients stay. What the root has is made on other ranks, and what it does not
    have is dropped.

    model -- helps to find embeddings whose gradients are sparse, as some optimizers want them

    Raises ValueError for LBFGS, for a root out of range, for another number of parameter groups than the root's, and,
    on all ranks, when the root's state has anything but tensors, numbers, strings, None, and lists or tuples of them;
    else what `ronde.Client.broadcast` does.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state: it is nested and of varying size")
    if not optimizer.state:
        _make_state(optimizer, model)
    description = _describe(optimizer) if mpi_ops.rank() == root_rank else {}
    description = _broadcast_json(description, root_rank, "optimizer_state.structure")
    if "error" in description:
        raise ValueError(description["error"])
    _take_options(optimizer, description["groups"])
    _take_state(optimizer, description["state"])
    window = Window()
    for name, tensor in _state_tensors(optimizer):
        window.submit(tensor.numel() * tensor.element_size(), _in_place(tensor, root_rank, name))
    window.finish()


def _make_state(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    """Steps once without moving anything: not by the distributed class, which would wait for other ranks."""
    modules = [] if model is None else list(model.modules())
    sparse = {
        each.weight for each in modules if isinstance(each, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and each.sparse
    }
    parameters = [parameter for parameter in _parameters(optimizer) if parameter.requires_grad]
    for parameter in parameters:
        zeros = torch.zeros_like(parameter)
        parameter.grad = zeros.to_sparse(1) if parameter in sparse else zeros
    before = [parameter.detach().clone() for parameter in parameters]
    decays = [(group, group["weight_decay"]) for group in optimizer.param_groups if "weight_decay" in group]
    for group, _ in decays:
        group["weight_decay"] = 0.0  # it would be in the momentum
    try:
        wrapped: Any = type(getattr(optimizer, "_wrapped", optimizer))
        wrapped.step(optimizer)
    finally:
        for group, decay in decays:
            group["weight_decay"] = decay
        with torch.no_grad():
            for parameter, value in zip(parameters, before):
                parameter.copy_(value)
    for state in optimizer.state.values():
        step = state.get("step")
        state["step"] = torch.zeros_like(step) if isinstance(step, torch.Tensor) else 0
        if step is None:
            del state["step"]


def _named(params: Any) -> list[tuple[str | None, torch.Tensor]]:
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
    """A broadcast that a window waits for."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def wait(self) -> None:
        world.synchronize(self._handle)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _describe(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer without the elements of its tensors; for JSON."""
    try:
        groups = [
            {key: _describe_value(value, key) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        state = {
            str(index): {key: _describe_value(value, key) for key, value in optimizer.state[parameter].items()}
            for index, parameter in enumerate(_parameters(optimizer))
            if parameter in optimizer.state
        }
    except ValueError as error:
        return {"error": str(error)}  # told to all ranks, which would wait otherwise
    return {"groups": groups, "state": state}


def _describe_value(value: Any, key: str) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).partition(".")[2]
        return {"tensor": [dtype, list(value.shape), value.device.type == "cpu"]}
    if isinstance(value, tuple):
        return {"tuple": [_describe_value(item, key) for item in value]}
    if isinstance(value, list):
        return {"list": [_describe_value(item, key) for item in value]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    raise ValueError(f"cannot broadcast {key} of the optimizer: a {type(value).__name__} is neither number nor tensor")


def _value_of(description: dict[str, Any], parameter: torch.Tensor | None, now: Any) -> Any:
    """The described value; a tensor is the one that is there already if it fits, else a new one to be filled."""
    if "tensor" in description:
        dtype_name, shape, on_cpu = description["tensor"]
        dtype: torch.dtype = getattr(torch, dtype_name)
        if isinstance(now, torch.Tensor) and now.dtype == dtype and list(now.shape) == shape:
            return now
        device = torch.device("cpu") if on_cpu or parameter is None else parameter.device
        return torch.zeros(shape, dtype=dtype, device=device)
    for kind, make in (("tuple", tuple), ("list", list)):
        if kind in description:
            items = description[kind]
            known = list(now) if isinstance(now, (tuple, list)) else []
            known += [None] * (len(items) - len(known))
            return make(_value_of(item, parameter, was) for item, was in zip(items, known))
    return description["value"]


def _take_options(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"the root's optimizer has {len(groups)} parameter groups, this one {len(optimizer.param_groups)}"
        )
    for group, described in zip(optimizer.param_groups, groups):
        for key, description in described.items():
            group[key] = _value_of(description, None, group.get(key))


def _take_state(optimizer: torch.optim.Optimizer, state: dict[str, dict[str, Any]]) -> None:
    for index, parameter in enumerate(_parameters(optimizer)):
        described = state.get(str(index))
        if described is None:
            optimizer.state.pop(parameter, None)
            continue
        now = optimizer.state[parameter]
        optimizer.state[parameter] = {
            key: _value_of(description, parameter, now.get(key)) for key, description in described.items()
        }


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
    """All tensors of options and state with their names, in the same order on all ranks."""
    for index, group in enumerate(optimizer.param_groups):
        for key in sorted(key for key in group if key != "params"):
            yield from _tensors_in(group[key], f"optimizer_state.group.{index}.{key}")
    for index, parameter in enumerate(_parameters(optimizer)):
        if parameter in optimizer.state:
            state = optimizer.state[parameter]
            for key in sorted(state):
                yield from _tensors_in(state[key], f"optimizer_state.{index}.{key}")


def _tensors_in(value: Any, name: str) -> Iterable[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _tensors_in(item, f"{name}.{index}")


def _broadcast_json(value: Any, root_rank: int, name: str) -> Any:
    """The root's value; only what JSON can say."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    told = broadcast_bytes(text if mpi_ops.rank() == root_rank else None, root_rank, name)
    return json.loads(bytes(told.tolist()).decode())
