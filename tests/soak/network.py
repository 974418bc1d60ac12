"""Hosts as network namespaces, whose links can be cut and made bad. Needs root."""

from __future__ import annotations

import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator

from ronde.bench import network

TESTS = pathlib.Path(__file__).parents[1]


class Network(network.Network):
    """Hosts `0` to `hosts - 1`.

    folder -- for a file of the network's
    """

    def __init__(self, hosts: int, folder: pathlib.Path) -> None:
        super().__init__(hosts, folder)
        self.hosts = hosts
        # Each packet as long as on a wire and with its checksum, so that a line can carry it.
        off = [word for offload in ("tx", "tso", "gso", "gro") for word in (offload, "off")]
        for host in range(hosts):
            _run(*self.on(host, ["ethtool", "--offload", self.link(host), *off]))

    def set_link(self, host: int, is_up: bool) -> None:
        """Cuts a host off, or connects it again."""
        self._in_switch("set", f"p{host}", "up" if is_up else "down")

    @contextlib.contextmanager
    def worsened(self, host: int, delay_s: float = 0.0, reordered: float = 0.0, lost: float = 0.0) -> Iterator[None]:
        """Puts a bad line between a host and the bridge; see `line`."""
        port, line = f"p{host}", None
        self._in_switch("add", "line-in", "type", "veth", "peer", "name", "line-out")
        try:
            self._in_switch("set", port, "nomaster")
            self._in_switch("set", "line-out", "master", "br0", "up")
            self._in_switch("set", "line-in", "up")
            numbers = [str(number) for number in (delay_s, reordered, lost)]
            command = [
                "ip",
                "netns",
                "exec",
                self._switch,
                sys.executable,
                "-m",
                "soak.line",
                port,
                "line-in",
                *numbers,
            ]
            line = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=TESTS)
            assert line.stdout is not None
            if line.stdout.readline() != b"ready\n":
                raise RuntimeError("the line has not been made")
            yield
        finally:
            if line is not None:
                line.kill()
                line.communicate()
            self._in_switch("delete", "line-in")
            self._in_switch("set", port, "master", "br0")

    def _in_switch(self, *words: str) -> None:
        _run("ip", "-n", self._switch, "link", *words)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
