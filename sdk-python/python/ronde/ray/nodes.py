"""Where a worker of Ray runs, which nodes are alive, and whether Ray's connections use TLS."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import ray

from ronde.cluster.layout import Place
from ronde.processes import own_host

if TYPE_CHECKING:
    from collections.abc import Mapping

_TRUE = ("1", "true")


def describe() -> Place:
    """Returns the place of this process, a worker of Ray."""
    gpus = tuple(str(each) for each in ray.get_gpu_ids())
    node = ray.get_runtime_context().get_node_id()
    return Place(node, ray.util.get_node_ip_address(), own_host(), os.geteuid(), os.getpid(), gpus, uses_tls())


def alive_nodes() -> list[Mapping[str, Any]]:
    """Returns the entries of Ray's table of nodes for those that are alive."""
    # Ray writes both names. Tables that programs for Horovod put in its place have only the one that Horovod reads.
    return [node for node in ray.nodes() if node.get("alive", node.get("Alive", False))]


def uses_tls() -> bool:
    """Returns whether this process's connections of Ray use TLS: Ray reads this variable when it starts them."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in _TRUE
