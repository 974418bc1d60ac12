"""One rank of a world: receives programs from the parent and reports what it sees.

worker.py BACKEND RANKS FOLDER [RANK]     RANK for Gloo only; `ronde run` gives its own
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from differential.c10d_worker import Rank


def main() -> None:
    """Runs programs until the parent ends the stream."""
    backend, size, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if len(sys.argv) > 4:
        os.environ["DIFFERENTIAL_RANK"] = sys.argv[4]
    torch.set_num_threads(1)
    me: Any = Rank(backend, size, folder)
    if backend == "torch":
        from differential.torch_calls import TorchRank

        me = TorchRank(size)
    me.begin()
    with open(os.path.join(folder, f"stack-{me.rank}"), "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack)
        connection = connect(os.path.join(folder, "socket"))
        connection.send((me.rank, os.getpid()))
        while (program := connection.recv()) is not None:
            connection.send(sabotaged(execute(me, program), program, me))
    # Sessions and groups end with the process: ranks that are in disorder do not wait for each other.
    os._exit(0)


def connect(path: str) -> Connection:
    """The connection to the parent."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.connect(path)
    return Connection(connected.detach())


def execute(me: Any, program: dict[str, Any]) -> dict[str, Any]:
    """What this rank reports of a program."""
    if program["kind"] == "reset":
        me.reset(program["timeout_s"])
        return {}
    return me.run(program)


def sabotaged(report: dict[str, Any], program: dict[str, Any], me: Any) -> dict[str, Any]:
    """The report, or what a fault that the harness is to find makes of it (see test_differential_harness.py)."""
    fault = program.get("sabotage")
    if fault is None or (fault["backend"], fault["rank"]) != (me.backend, me.rank):
        return report
    if fault["kind"] == "hang":
        time.sleep(3_600)
    if fault["kind"] == "death":
        os._exit(3)
    if fault["kind"] == "value":
        packed = report["values"][fault["name"]]
        packed["data"] = bytes([packed["data"][0] ^ 1]) + packed["data"][1:]
    if fault["kind"] == "error":
        report["steps"][0]["error"] = {"kind": ["RuntimeError"], "text": "RuntimeError: planted"}
    return report


if __name__ == "__main__":
    main()
