"""The network sockets of a process and those that it started, from `/proc`."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pathlib
import re
import socket
import struct
import threading
from typing import NamedTuple

# States of sockets in /proc/net, as the kernel numbers them.
_LISTEN = "0A"
_UNCONNECTED = "07"
_PROC = pathlib.Path("/proc")


class Open(NamedTuple):
    """A socket that others can send to: one of TCP that listens, or one of UDP.

    program -- the name of its process
    kind    -- tcp or udp
    address -- to which it is bound
    port    -- its port
    """

    program: str
    kind: str
    address: str
    port: int

    def is_reachable(self) -> bool:
        """Whether another host can reach it."""
        return not ipaddress.ip_address(self.address).is_loopback


class Watch(threading.Thread):
    """Reads the sockets of a process and its descendants until `stop`, and keeps those that it found in `found`."""

    INTERVAL_S = 0.02

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self.found: set[Open] = set()
        self.programs: set[str] = set()
        self._root = root
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(self.INTERVAL_S):
            for pid in descendants(self._root):
                with contextlib.suppress(OSError):  # it has ended
                    self.programs.add(_program(pid))
                    self.found |= sockets(pid)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def descendants(root: int) -> set[int]:
    """The process and all that it has started and that run."""
    parents = {}
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def sockets(pid: int) -> set[Open]:
    """The sockets of a process that others can send to."""
    links = set()
    for descriptor in (_PROC / str(pid) / "fd").iterdir():
        with contextlib.suppress(OSError):  # it is closed
            links.add(os.readlink(descriptor))
    inodes = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    program, found = _program(pid), set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in (_PROC / str(pid) / "net" / table).read_text().splitlines()[1:]:
            row = line.split()
            # Only its peer can send to a connected socket.
            if row[9] in inodes and row[3] == (_LISTEN if table.startswith("tcp") else _UNCONNECTED):
                found.add(Open(program, table[:3], *_address(row[1])))
    return found


def _program(pid: int) -> str:
    return pathlib.Path(os.readlink(_PROC / str(pid) / "exe")).name


def _address(text: str) -> tuple[str, int]:
    """Parses an address as the kernel writes it: words of 32 bits in the machine's order."""
    digits, port = text.split(":")
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    address = socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)
    return address.removeprefix("::ffff:") if "." in address else address, int(port, 16)
