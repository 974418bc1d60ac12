"""The TCP ports on which this process listens, from its own descriptors."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import threading

_LISTEN = "0A"


def listening() -> set[str]:
    """Returns address and port, in hexadecimal as Linux writes them, of each socket of this process that listens."""
    links = set()
    for descriptor in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the directory itself is closed
            links.add(os.readlink(descriptor))
    sockets = {match[1] for link in links if (match := re.fullmatch(r"socket:\[(\d+)\]", link))}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in pathlib.Path("/proc/self/net", table).read_text().splitlines()[1:]
    ]
    return {row[1] for row in rows if row[3] == _LISTEN and row[9] in sockets}


class Watch(threading.Thread):
    """Reads the ports every few milliseconds until `stop`, and keeps those that it found in `ports`."""

    INTERVAL_S = 0.003

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ports: set[str] = set()
        self.rounds = 0
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(self.INTERVAL_S):
            self.ports |= listening()
            self.rounds += 1

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        self.ports |= listening()
