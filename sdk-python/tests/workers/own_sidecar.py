"""What workers of tests find out about their sidecar, and about those of the whole job on this host."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import struct
import subprocess
from typing import Any


def process() -> int:
    """Returns the number of the process that listens on this rank's socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(pathlib.Path(os.environ["RONDE_SOCKET"]) / "rpc.sock"))
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", credentials)[0]
    return pid


def page() -> dict[str, Any]:
    """Returns the status page of this rank's sidecar."""
    (found,) = _pages("--socket", os.environ["RONDE_SOCKET"])
    return found


def pages() -> list[dict[str, Any]]:
    """Returns the status pages of all sidecars of this user on this host that answer."""
    return _pages()


def pending(*of: dict[str, Any]) -> set[tuple[int, str]]:
    """Returns the ranks and names of the requests that the sidecars of these pages have not performed yet."""
    return {(request["rank"], request["name"]) for each in of for request in each["pending_requests"]}


def _pages(*options: str) -> list[dict[str, Any]]:
    command = [os.environ["RONDE_BIN"], "status", "--json", *options]
    # Otherwise the command shows the sidecar that this variable names.
    environment = {name: value for name, value in os.environ.items() if name != "RONDE_SOCKET"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=environment)
    return [json.loads(line) for line in done.stdout.splitlines()]
