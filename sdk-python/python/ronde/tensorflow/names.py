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


def name_of(kind: str, tensor: Any, name: str | None, ignore_name_scope: bool = False) -> str:
    """Returns the name of an operation; "" for an eager one that has none.

    kind   -- the operation, for one without a name
    tensor -- its input in a graph, after which an operation without a name is named; None for the kind alone
    ignore_name_scope -- whether a graph's name scope is left out, which `tf.name_scope` adds to given names

    A second operation of one name in a graph gets a number, as nodes do.
    """
    if tf.executing_eagerly():
        return name or ""
    graph = tf.compat.v1.get_default_graph()
    found = name or (kind if tensor is None else f"{kind}_{_INVALID.sub('_', tensor.name)}")
    scope = graph.get_name_scope()
    if scope and not ignore_name_scope:
        found = f"{scope}/{found}"
    return numbered(graph, found)


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
