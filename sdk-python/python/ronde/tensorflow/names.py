"""Names of operations in graphs, by which ranks match them.

Operations of a graph run in another order on each rank, so each has a name, made when the graph is traced. Eager
operations without a name are matched in call order.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from typing import Any

import tensorflow as tf

_INVALID = re.compile(r"[^a-zA-Z0-9_.]")
_counts: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
_paths: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
# Graphs of branches and loops. Their name scope is the name of the node, so that they need no other; the branches of
# one node have the same: where ranks take different ones, their operations of equal names match.
_PARTS = {"CondBranchFuncGraph", "WhileCondFuncGraph", "WhileBodyFuncGraph"}


def name_of(kind: str, tensor: Any, name: str | None, ignore_name_scope: bool = False) -> str:
    """Returns the name of an operation; "" for an eager one that has none.

    kind   -- the operation, for one without a name
    tensor -- its input in a graph, after which an operation without a name is named; None for the kind alone
    ignore_name_scope -- whether a graph's name scope is left out, which `tf.name_scope` adds to given names

    A second operation of one name in a graph gets a number, as nodes do. The name of an operation in a function
    that another one calls begins with that of its function: two of them may run at the same time, and in another order
    on each rank.
    """
    if tf.executing_eagerly():
        return name or ""
    graph = tf.compat.v1.get_default_graph()
    found = name or (kind if tensor is None else f"{kind}_{_INVALID.sub('_', tensor.name)}")
    scope = graph.get_name_scope()
    if not ignore_name_scope:
        found = "/".join(each for each in (_path(graph), scope, found) if each)
    return numbered(graph, found)


def _path(graph: Any) -> str:
    """Returns the functions around a graph, within the outermost one; "" for that one itself."""
    known = _paths.get(graph)
    if known is None:
        known = _paths[graph] = _find_path(graph)
    return known


def _find_path(graph: Any) -> str:
    outer = getattr(graph, "outer_graph", None)
    # A program that runs eagerly has a graph that contains nothing.
    if outer is None or (not hasattr(outer, "outer_graph") and tf.compat.v1.executing_eagerly_outside_functions()):
        return ""
    if type(graph).__name__ in _PARTS:
        return _path(outer)
    found = "/".join(each for each in (_path(outer), _INVALID.sub("_", graph.name)) if each)
    return numbered(outer, found)


def numbered(graph: Any, name: str) -> str:
    """Returns the name, with a number if the graph has it already: one that makes a name which nothing has."""
    counts = _counts.setdefault(graph, Counter())
    found = name
    while counts[found]:
        found = f"{name}_{counts[name]}"
        counts[name] += 1
    counts[found] += 1
    return found


def gradient_name(operation: Any, part: str = "gradient") -> str:
    """Returns the name of the operation that a gradient needs; "" if the operation itself has none."""
    forward = operation.get_attr("tensor_name")
    forward = forward.decode() if isinstance(forward, bytes) else forward
    if not forward:
        return ""
    name = f"{forward}.{part}"
    return name if tf.executing_eagerly() else numbered(tf.compat.v1.get_default_graph(), name)
