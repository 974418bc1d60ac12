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
        self._links: subprocess.Popen[str] | None = None
        super().__init__(hosts, folder)
        self.hosts = hosts
        # Each packet as long as on a wire and with its checksum, so that a line can carry it.
        off = [word for offload in ("tx", "tso", "gso", "gro") for word in (offload, "off")]
        for host in range(hosts):
            _run(*self.on(host, ["ethtool", "--offload", self.link(host), *off]))
        # It waits for commands. A process that is started for each command may take seconds on a busy machine: a link
        # would be cut for longer than the peer timeout.
        command = ["ip", "-n", self._switch, "-oneline", "-batch", "-"]
        self._links = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        """Removes the hosts."""
        if self._links is not None:
            self._links.communicate()
        super().close()

    @contextlib.contextmanager
    def cut(self, host: int) -> Iterator[None]:
        """Cuts a host off."""
        self._in_switch(f"set p{host} down")
        try:
            yield
        finally:
            self._in_switch(f"set p{host} up")

    @contextlib.contextmanager
    def worsened(self, host: int, delay_s: float = 0.0, reordered: float = 0.0, lost: float = 0.0) -> Iterator[None]:
        """Puts a bad line between a host and the bridge; see `line`. The host is cut off only while the ends change."""
        port = f"p{host}"
        self._in_switch("add line-in type veth peer name line-out", "set line-in up", "set line-out up")
        try:
            with self._line(port, delay_s, reordered, lost):
                try:
                    self._in_switch(f"set {port} nomaster", "set line-out master br0")
                    yield
                finally:
                    self._in_switch("set line-out nomaster", f"set {port} master br0")
        finally:
            self._in_switch("delete line-in")

    @contextlib.contextmanager
    def _line(self, port: str, *numbers: float) -> Iterator[None]:
        """The process of a line between a port and `line-in`, which carries frames."""
        program = [sys.executable, "-m", "soak.line", port, "line-in", *map(str, numbers)]
        command = ["ip", "netns", "exec", self._switch, *program]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=TESTS) as line:
            try:
                assert line.stdout is not None
                if line.stdout.readline() != b"ready\n":
                    raise RuntimeError("the line has not been made")
                yield
            finally:
                line.kill()

    def _in_switch(self, *commands: str) -> None:
        """Changes links of the switch, one right after the other; returns when that is done."""
        assert self._links is not None
        assert self._links.stdin is not None
        assert self._links.stdout is not None
        # What the last command prints follows what the others do. At one that fails the process ends.
        lines = "".join(f"link {command}\n" for command in (*commands, "show dev br0"))
        try:
            self._links.stdin.write(lines)
            self._links.stdin.flush()
            answer = self._links.stdout.readline()
        except OSError:  # it ended at a command before
            answer = ""
        if not answer:
            raise RuntimeError(f"`ip link` has failed at one of {commands}")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
