"""Plugins: sandboxed programs in the sidecar that compress or reduce the tensors of an operation."""

from __future__ import annotations

import math
import operator
from typing import Any, Union

import numpy

ParameterValue = Union[bool, int, float, str]

_INT_MAX = 1 << 63


class _Named:
    """A plugin with parameters. It is hashable and compares by value."""

    def __init__(self, name: str, /, **parameters: Any) -> None:
        if not isinstance(name, str):
            raise ValueError(f"a plugin is named by a str, such as 'topk' or 'topk@1.0.0', not by {name!r}")
        self._name = name
        self._parameters = {key: _value(name, key, value) for key, value in parameters.items()}

    @property
    def name(self) -> str:
        """The plugin's name, followed by @ and its version if one was given."""
        return self._name

    @property
    def parameters(self) -> dict[str, ParameterValue]:
        """The given parameters; all others have their defaults."""
        return dict(self._parameters)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, _Named) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((type(self), self._key()))

    def __repr__(self) -> str:
        given = "".join(f", {key}={value!r}" for key, value in self._parameters.items())
        return f"{type(self).__name__}({self._name!r}{given})"

    def _key(self) -> tuple[str, frozenset[tuple[str, type, ParameterValue]]]:
        # 1, 1.0 and True are equal in Python, and not to a plugin.
        return self._name, frozenset((key, type(value), value) for key, value in self._parameters.items())


class Plugin(_Named):
    """A plugin that is a codec: it encodes contributions to a sum or an average for the transfer between sidecars.

        client.allreduce(gradient, name="gradient", codec=ronde.Plugin("topk", ratio=0.01))

    name       -- `NAME` or `NAME@VERSION` of a plugin that the sidecars have; plugins/README.md lists those that come
                  with ronde
    parameters -- keywords, of the types that the plugin's manifest declares: bool, int, float (finite; an int is
                  accepted, too) or str for one of several choices; also NumPy's scalars. The others have their
                  defaults. All ranks must give the same.

    A codec that keeps state between operations, such as the residuals of error feedback, identifies a tensor by process
    set and name: give the operations on one tensor the same `name`.

    Raises ValueError for a name that is not a str and for a value of another type. The sidecar checks whether it has
    such a plugin for these parameters and tensors: if not, the operation raises RefusedError on all ranks.
    """


class PluginOp(_Named):
    """A plugin that is a reducer, in place of a reduction such as Sum: `op=ronde.PluginOp("median")`.

    name, parameters -- as for `Plugin`

    For all-reduce only. Raises what `Plugin` does.
    """


def call_of(plugin: Plugin | PluginOp) -> tuple[str, list[tuple[str, ParameterValue]]]:
    """Returns the name and the parameters in the form that the native client takes."""
    return plugin.name, list(plugin.parameters.items())


def _value(name: str, key: str, given: Any) -> ParameterValue:
    # Bool comes first: Python's bools are ints.
    if isinstance(given, (bool, numpy.bool_)):
        return bool(given)
    if isinstance(given, str):
        return str(given)
    if isinstance(given, (float, numpy.floating)):
        return _finite(name, key, float(given))
    try:
        number = operator.index(given)
    except TypeError:
        raise ValueError(
            f"plugin {name}: {key} is {given!r}, a {type(given).__name__}; parameters are bool, int, float or str"
        ) from None
    if not -_INT_MAX <= number < _INT_MAX:
        raise ValueError(f"plugin {name}: {key} is {number}, which is not within 64 bits")
    return number


def _finite(name: str, key: str, number: float) -> float:
    if not math.isfinite(number):
        raise ValueError(f"plugin {name}: {key} is {number}, but must be finite")
    return number
