"""Where a worker of Ray runs, and whether its connections use TLS."""

from __future__ import annotations

import os

import ray

from ronde.cluster.layout import Place
from ronde.processes import own_host

_TRUE = ("1", "true")


def describe() -> Place:
    """Returns the place of this process, a worker of Ray."""
    gpus = tuple(str(each) for each in ray.get_gpu_ids())
    node = ray.get_runtime_context().get_node_id()
    return Place(node, ray.util.get_node_ip_address(), own_host(), os.geteuid(), os.getpid(), gpus, uses_tls())


def uses_tls() -> bool:
    """Returns whether this process's connections of Ray use TLS: Ray reads this variable when it starts them."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in _TRUE
