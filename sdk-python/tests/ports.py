"""Ports for programs that tests start, below those that the kernel gives to sockets of programs (from 32,768 on).

Between a probe and the program's own bind, the kernel may give one of its ports to any socket on the machine. Each of
up to three processes of tests has ports of its own.
"""

from __future__ import annotations

import itertools
import os
import socket

_PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 3
_SINGLE = 28_000 + 1_500 * _PROCESS
# Runs of the tests on one machine at the same time begin at different ones.
_numbers = itertools.count(os.getpid())


def free_ports(nodes: int) -> int:
    """The first of as many ports as nodes of torchrun need, which nothing listens to now.

    Not all nodes listen to theirs, so a probe does not find another test's.
    """
    for first in range(10_000 + 6000 * _PROCESS, 16_000 + 6000 * _PROCESS, 2000):
        if _is_free("127.0.0.1", first):
            return first
    raise AssertionError(f"no ports for {nodes} nodes")


def free_port() -> int:
    """A port of this machine that nothing listens to now; another one in each call."""
    for _ in range(1_500):
        port = _SINGLE + next(_numbers) % 1_500
        if _is_free("", port):
            return port
    raise AssertionError("no port is free")


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True
