"""Describes an optimizer's options and state as JSON, with its tensors by name.

A description contains everything but the elements of tensors. Each value is an object with one key, its kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Callable

import numpy
import torch

from ronde.tensors import DTYPES, torch_dtype_name

Description = dict  # of JSON


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns all parameters, in the order of the groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def describe(optimizer: torch.optim.Optimizer) -> Description[str, Any]:
    """Describes the whole optimizer. Returns {"error": text} if it has a value that cannot be broadcast."""
    parameters, states = parameters_of(optimizer), optimizer.state
    other_keys = [key for key in states if not isinstance(key, torch.Tensor)]
    try:
        return {
            "shapes": _shapes(optimizer),
            "groups": [
                {key: describe_value(value, key) for key, value in group.items() if key != "params"}
                for group in optimizer.param_groups
            ],
            "state": {
                str(index): describe_value(states[parameter], "state")
                for index, parameter in enumerate(parameters)
                if parameter in states
            },
            "others": [[_plain_key(key), describe_value(states[key], str(key))] for key in other_keys],
        }
    except ValueError as error:
        return {"error": str(error)}  # sent to all ranks, which would wait otherwise


def difference(optimizer: torch.optim.Optimizer, description: Description[str, Any]) -> str | None:
    """Returns why a description does not fit an optimizer, such as another number of groups or other shapes."""
    mine, roots = _shapes(optimizer), description["shapes"]
    if len(mine) != len(roots):
        return f"the root's optimizer has {len(roots)} parameter groups, this one {len(mine)}"
    for number, (here, there) in enumerate(zip(mine, roots)):
        if len(here) != len(there):
            return f"group {number} of the root's optimizer has {len(there)} parameters, this one {len(here)}"
        for index, (own, root) in enumerate(zip(here, there)):
            if own != root:
                return f"parameter {index} of group {number} is of shape {root} on the root, here of shape {own}"
    return None


def take(optimizer: torch.optim.Optimizer, description: Description[str, Any]) -> None:
    """Applies the described options and state to an optimizer. New tensors are zeros; other state is dropped."""
    for group, described in zip(optimizer.param_groups, description["groups"]):
        for key, value in described.items():
            group[key] = _value_of(value, None, group.get(key))
    states = optimizer.state
    kept: dict[Any, Any] = {}
    for index, parameter in enumerate(parameters_of(optimizer)):
        value = description["state"].get(str(index))
        if value is not None:
            kept[parameter] = _value_of(value, parameter, states.get(parameter))
    for key, value in description["others"]:
        kept[key] = _value_of(value, None, states.get(key))
    states.clear()
    states.update(kept)


def tensors_of(
    optimizer: torch.optim.Optimizer, description: Description[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns the described tensors with their names, in the same order on all ranks."""
    for number, (group, described) in enumerate(zip(optimizer.param_groups, description["groups"])):
        for key, value in described.items():
            yield from _tensors_in(value, group[key], f"optimizer_state.group.{number}.{key}")
    parameters = parameters_of(optimizer)
    for index, value in description["state"].items():
        yield from _tensors_in(value, optimizer.state[parameters[int(index)]], f"optimizer_state.{index}")
    for key, value in description["others"]:
        yield from _tensors_in(value, optimizer.state[key], f"optimizer_state.other.{key}")


def is_dense(description: Description[str, Any]) -> bool:
    """Returns whether all described tensors are dense ones of PyTorch: no sparse ones, and no arrays of NumPy."""
    return not _has_kind(description, {"sparse", "array"})


def describe_value(value: Any, key: str) -> Description[str, Any]:
    """Describes a value of an option or a state. Raises ValueError with its key for one that cannot be broadcast."""
    for kind, describe_it in _KINDS:
        if isinstance(value, kind):
            return describe_it(value, key)
    raise ValueError(
        f"cannot broadcast {key} of the optimizer: a {type(value).__name__} is no tensor, number, text, type or None, "
        "and no list, tuple or dictionary of them"
    )


def _describe_tensor(value: torch.Tensor, key: str) -> Description[str, Any]:
    dtype, shape, on_cpu = torch_dtype_name(value.dtype), list(value.shape), value.device.type == "cpu"
    if value.layout not in (torch.strided, torch.sparse_coo) or dtype not in DTYPES:
        raise ValueError(f"cannot broadcast {key} of the optimizer: a tensor of type {dtype} and layout {value.layout}")
    if value.layout == torch.sparse_coo:
        return {"sparse": [dtype, shape, on_cpu, value.sparse_dim(), value.coalesce().values().shape[0]]}
    return {"tensor": [dtype, shape, on_cpu]}


def _describe_array(value: numpy.ndarray[Any, Any], key: str) -> Description[str, Any]:
    if value.dtype.name not in DTYPES:
        raise ValueError(f"cannot broadcast {key} of the optimizer: a NumPy array of type {value.dtype}")
    return {"array": [value.dtype.name, list(value.shape)]}


def _describe_numpy(value: numpy.generic, key: str) -> Description[str, Any]:
    number = value.item()
    if not isinstance(number, (bool, int, float, complex, str)):
        raise ValueError(f"cannot broadcast {key} of the optimizer: a NumPy scalar of type {value.dtype}")
    return {"numpy": [value.dtype.str, describe_value(number, key)]}


def _describe_dict(value: Mapping[Any, Any], key: str) -> Description[str, Any]:
    return {"dict": [[_plain_key(each), describe_value(item, f"{key}.{each}")] for each, item in value.items()]}


def _plain_key(key: Any) -> Any:
    if isinstance(key, (bool, int, float, str)) or key is None:
        return key
    raise ValueError(f"cannot broadcast the optimizer: the key {key!r} of a dictionary is neither text nor a number")


# The first match is used: some scalars of NumPy are Python's, too.
_KINDS: tuple[tuple[Any, Callable[[Any, str], Description[str, Any]]], ...] = (
    (torch.Tensor, _describe_tensor),
    (numpy.ndarray, _describe_array),
    (numpy.generic, _describe_numpy),
    (tuple, lambda value, key: {"tuple": [describe_value(item, key) for item in value]}),
    (list, lambda value, key: {"list": [describe_value(item, key) for item in value]}),
    (Mapping, _describe_dict),
    ((bool, int, float, str, type(None)), lambda value, key: {"value": value}),
    (complex, lambda value, key: {"complex": [value.real, value.imag]}),
    (torch.dtype, lambda value, key: {"dtype": torch_dtype_name(value)}),
    (numpy.dtype, lambda value, key: {"numpy_dtype": value.str}),
    (torch.device, lambda value, key: {"device": str(value)}),
)


def _value_of(description: Description[str, Any], parameter: torch.Tensor | None, now: Any) -> Any:
    """Returns the described value. A tensor is the current one if it fits, else a new one, which is filled later."""
    ((kind, content),) = description.items()
    if kind == "value":
        return content
    return _MAKERS[kind](content, parameter, now)


def _make_tensor(content: Any, parameter: torch.Tensor | None, now: Any) -> torch.Tensor:
    dtype_name, shape, on_cpu = content
    dtype: torch.dtype = getattr(torch, dtype_name)
    if isinstance(now, torch.Tensor) and (now.dtype, list(now.shape), now.layout) == (dtype, shape, torch.strided):
        return now
    device = torch.device("cpu") if on_cpu or parameter is None else parameter.device
    return torch.zeros(shape, dtype=dtype, device=device)


def _make_sparse(content: Any, parameter: torch.Tensor | None, now: Any) -> torch.Tensor:
    dtype_name, shape, on_cpu, sparse_dim, count = content
    device = torch.device("cpu") if on_cpu or parameter is None else parameter.device
    indices = torch.zeros(sparse_dim, count, dtype=torch.int64, device=device)
    values = torch.zeros(count, *shape[sparse_dim:], dtype=getattr(torch, dtype_name), device=device)
    # Indices and values are received into it; those of the root are coalesced.
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=False, is_coalesced=True)


def _make_array(content: Any, parameter: torch.Tensor | None, now: Any) -> numpy.ndarray[Any, Any]:
    dtype, shape = content
    return numpy.zeros(shape, dtype=dtype)


def _make_items(content: Any, parameter: torch.Tensor | None, now: Any) -> list[Any]:
    known = list(now) if isinstance(now, (tuple, list)) else []
    known += [None] * (len(content) - len(known))
    return [_value_of(item, parameter, was) for item, was in zip(content, known)]


def _make_tuple(content: Any, parameter: torch.Tensor | None, now: Any) -> tuple[Any, ...]:
    items = _make_items(content, parameter, now)
    is_named = isinstance(now, tuple) and hasattr(now, "_make") and len(now) == len(items)
    return now._make(items) if is_named else tuple(items)


def _make_dict(content: Any, parameter: torch.Tensor | None, now: Any) -> dict[Any, Any]:
    known = now if isinstance(now, Mapping) else {}
    return {key: _value_of(item, parameter, known.get(key)) for key, item in content}


def _make_numpy(content: Any, parameter: torch.Tensor | None, now: Any) -> Any:
    dtype, number = content
    return numpy.dtype(dtype).type(_value_of(number, None, None))


_MAKERS: dict[str, Callable[[Any, torch.Tensor | None, Any], Any]] = {
    "tensor": _make_tensor,
    "sparse": _make_sparse,
    "array": _make_array,
    "numpy": _make_numpy,
    "tuple": _make_tuple,
    "list": _make_items,
    "dict": _make_dict,
    "complex": lambda content, parameter, now: complex(*content),
    "dtype": lambda content, parameter, now: getattr(torch, content),
    "numpy_dtype": lambda content, parameter, now: numpy.dtype(content),
    # Each rank has its own device.
    "device": lambda content, parameter, now: now if isinstance(now, torch.device) else torch.device(content),
}


def _tensors_in(description: Description[str, Any], value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    ((kind, content),) = description.items()
    if kind == "tensor":
        yield name, value
    elif kind == "sparse":
        coalesced = value.detach().coalesce()
        yield f"{name}.indices", coalesced.indices()
        yield f"{name}.values", coalesced.values()
    elif kind == "array":
        yield name, torch.from_numpy(numpy.require(value, requirements=["C", "W"]))
    elif kind in ("tuple", "list"):
        for index, (item, inner) in enumerate(zip(content, value)):
            yield from _tensors_in(item, inner, f"{name}.{index}")
    elif kind == "dict":
        for key, item in content:
            yield from _tensors_in(item, value[key], f"{name}.{key}")


def _has_kind(described: Any, kinds: set[str]) -> bool:
    items = described.values() if isinstance(described, dict) else described if isinstance(described, list) else []
    is_value = isinstance(described, dict) and len(described) == 1
    return (is_value and not kinds.isdisjoint(described)) or any(_has_kind(item, kinds) for item in items)


def _shapes(optimizer: torch.optim.Optimizer) -> list[list[list[int]]]:
    return [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]
