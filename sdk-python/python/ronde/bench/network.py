"""Several hosts on one machine: network namespaces on a bridge, links with an MTU of 1,500 bytes. Needs root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from ronde.bench.errors import BenchError

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Sequence

# The kernel removes a namespace in fractions of a second, unless the machine is busy.
REMOVAL_SECONDS_MAX = 120.0


class Network:
    """Hosts `0` to `hosts - 1`, each with an address; `close` removes them.

    gbit -- bandwidth of a host's link in gigabits a second; None for no limit
    A shell that waits on a pipe removes them, so they are removed however this process ends.
    """

    def __init__(self, hosts: int, folder: pathlib.Path, gbit: float | None = None) -> None:
        self._prefix = f"ronde-bench-{os.getpid()}"
        self._hosts = hosts
        self._gbit = gbit
        self._switch = f"{self._prefix}-sw"
        self._guard = self._guarded()
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        self._write_remote_shell(folder / "remote-shell")

    @staticmethod
    def why_not() -> str | None:
        """Returns why hosts are impossible here, or None."""
        if os.environ.get("RONDE_NO_NETNS") == "1":
            return "RONDE_NO_NETNS=1"
        if os.geteuid() != 0:
            return "network namespaces need root"
        if shutil.which("ip") is None:
            return "`ip` (iproute2) is not installed"
        return None

    def address(self, host: int) -> str:
        """Returns a host's address."""
        return f"10.77.0.{host + 1}"

    def link(self, host: int) -> str:
        """Returns the name of a host's link."""
        return f"v{host}"

    def sent_bytes(self) -> int:
        """Returns the bytes that all hosts have sent over their links so far, headers included."""
        return sum(map(self._sent_bytes, range(self._hosts)))

    def on(self, host: int, command: Sequence[str]) -> list[str]:
        """Returns the command line that runs a command on a host."""
        return ["ip", "netns", "exec", self._host(host), *command]

    def close(self) -> None:
        """Removes the hosts."""
        assert self._guard.stdin is not None  # it was opened as a pipe
        self._guard.stdin.close()
        self._guard.wait(REMOVAL_SECONDS_MAX)

    def _sent_bytes(self, host: int) -> int:
        shown = json.loads(_ip("-n", self._host(host), "-json", "-stats", "link", "show", "dev", self.link(host)))
        count: int = shown[0]["stats64"]["tx"]["bytes"]
        return count

    def _host(self, host: int) -> str:
        return f"{self._prefix}-h{host}"

    def _guarded(self) -> subprocess.Popen[bytes]:
        names = [*map(self._host, range(self._hosts)), self._switch]
        removal = "; ".join(f"ip netns del {name}" for name in names)
        # A new session: an interrupt at the terminal ends the benchmark, which then ends this.
        return subprocess.Popen(
            ["sh", "-c", f"trap '' HUP INT TERM; read _; {removal}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "br0", "up")
        for host in range(self._hosts):
            name, link, port = self._host(host), self.link(host), f"p{host}"
            _ip("netns", "add", name)
            _ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", link, "netns", name)
            _ip("-n", self._switch, "link", "set", port, "master", "br0", "up")
            _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if self._gbit is not None:
                # Limits only what leaves a host: traffic to a host leaves another one.
                rate = ("rate", f"{self._gbit}gbit", "burst", "256kb", "latency", "50ms")
                _run("tc", "-n", name, "qdisc", "add", "dev", link, "root", "tbf", *rate)

    def _write_remote_shell(self, path: pathlib.Path) -> None:
        cases = "".join(f"{self.address(host)}) name={self._host(host)};; " for host in range(self._hosts))
        path.write_text(f'host=$1; shift; case $host in {cases}esac\nexec ip netns exec "$name" sh -c "$*"\n')
        # The launcher splits this at blanks; the path of a temporary directory contains none.
        self.remote_shell = f"sh {path}"


def _ip(*arguments: str) -> str:
    return _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(f"`{' '.join(command)}`: {done.stderr.strip()}")
    return done.stdout
