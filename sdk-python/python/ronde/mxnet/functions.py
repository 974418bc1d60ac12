"""Broadcasts parameters, so that all ranks start from the same."""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import partial
from typing import Any

import mxnet as mx
from mxnet.gluon.parameter import DeferredInitializationError, Parameter, ParameterDict

from ronde.frameworks import world
from ronde.frameworks.basics import client
from ronde.frameworks.process_sets import global_process_set, members_of, root_of
from ronde.frameworks.window import Window
from ronde.mxnet.mpi_ops import broadcast_, to_numpy, write


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Broadcasts the parameters of rank `root_rank` to all ranks, in place, on all devices of a parameter.

    params -- `Block.collect_params()`, or a dictionary of arrays, such as `Module.get_params()` returns, or of
              parameters; with the same names, types and shapes on all ranks
    prefix -- for the names of the operations

    A parameter whose shape is not known yet is broadcast as soon as it is initialized, which is in the first forward
    pass of each rank. Raises ValueError for anything else and a root out of range, and what `ronde.Client.broadcast`
    does. After an error only some parameters may be the root's.
    """
    if not isinstance(params, (ParameterDict, Mapping)):
        raise ValueError(f"params is {type(params).__name__}; give Block.collect_params() or a dictionary of arrays")
    world.current()
    root_of(root_rank, global_process_set)
    arrays: list[tuple[str, list[Any]]] = []
    for name, value in sorted(params.items()):
        full = f"parameter.{prefix or ''}{name}"
        if isinstance(value, mx.nd.NDArray):
            arrays.append((full, [value]))
        elif isinstance(value, Parameter):
            try:
                arrays.append((full, value.list_data()))
            except DeferredInitializationError:
                _broadcast_when_made(value, root_rank, full)
        else:
            raise ValueError(f"params[{name!r}] is {type(value).__name__}, neither an array nor a parameter")
    _broadcast(arrays, root_rank)


def _broadcast(arrays: list[tuple[str, list[Any]]], root_rank: int) -> None:
    """Several of them are in flight at once, so that small ones share messages."""
    root = root_of(root_rank, global_process_set)
    window = Window()
    for name, copies in arrays:
        given = to_numpy(copies[0])
        window.submit(given.nbytes, partial(_InPlace, copies, given, root, name))
    window.finish()


class _InPlace:
    """A broadcast in flight of arrays of a parameter, one on each device, for a window to wait for."""

    def __init__(self, copies: list[Any], given: Any, root: int, name: str) -> None:
        self._copies = copies
        members = members_of(global_process_set)
        with world.traced("broadcast", name):
            self._handle = client().broadcast_async(given, root, name, process_set=members)

    def wait(self) -> None:
        received = world.wait_for("broadcast", self._handle)
        for copy in self._copies:
            write(copy, received)


def _broadcast_when_made(parameter: Any, root_rank: int, name: str) -> None:
    """Replaces the method by which this parameter gets its first values, once."""
    make = parameter._init_impl

    def made(self: Any, *arguments: Any, **options: Any) -> None:
        self._init_impl = make
        make(*arguments, **options)
        first, *others = self.list_data()
        broadcast_(first, root_rank, name)
        for copy in others:
            write(copy, to_numpy(first))

    parameter._init_impl = types.MethodType(made, parameter)
