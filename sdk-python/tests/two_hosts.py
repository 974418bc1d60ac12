"""Two hosts for jobs: network namespaces with a link between them, and an `ssh` that reaches them. Requires root."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import subprocess
import tempfile
from typing import TYPE_CHECKING, NamedTuple

from conftest import leave_out

if TYPE_CHECKING:
    from collections.abc import Iterator

_numbers = itertools.count()

# As ssh: options, some with a value, then the host, then the words of the command.
SSH = """#!/bin/sh
while :; do
    case $1 in -o|-p|-i) shift 2;; -*) shift;; *) break;; esac
done
host=$1
shift
echo "$host" >> {folder}/calls
case $host in
{cases}
*) echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255;;
esac
exec {enter} "$name" "$*"
"""
ENTER = """#!/bin/sh
exec ip netns exec "$1" unshare --uts sh -c 'hostname "$1" && exec sh -c "$2"' sh "$1" "$2"
"""


class TwoHosts(NamedTuple):
    """Two hosts.

    addresses -- of each
    folder    -- with the `ssh` that reaches them, for PATH
    names     -- of their namespaces, which are also their host names
    """

    addresses: tuple[str, str]
    folder: pathlib.Path
    names: tuple[str, str]

    def on_first(self, command: list[str]) -> list[str]:
        """A command that runs on the first of them."""
        return self.on(0, command)

    def on(self, host: int, command: list[str]) -> list[str]:
        """A command that runs on one of them, 0 or 1."""
        words = ["ip", "netns", "exec", self.names[host], "unshare", "--uts"]
        return [*words, "sh", "-c", 'hostname "$0" && exec "$@"', self.names[host], *command]

    def give_second_its_own(self, folder: str) -> None:
        """Gives the second host a separate folder instead of `folder`."""
        (self.folder / "own").mkdir()
        own = f'mount --bind {self.folder}/own {folder} && exec "$@"'
        enter = ENTER.replace("unshare --uts", "unshare --uts --mount")
        enter = enter.replace("exec ip", f"[ \"$1\" = {self.names[1]} ] && own='{own}' || own='exec \"$@\"'\nexec ip")
        script(self.folder / "enter", enter.replace("sh -c 'hostname", 'sh -c "$own" sh sh -c \'hostname'))

    def reached(self) -> set[str]:
        """The hosts to which `ssh` was called."""
        return set((self.folder / "calls").read_text().split())


@contextlib.contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Makes two hosts, and removes them in the end."""
    if os.environ.get("RONDE_NO_NETNS") == "1" or os.geteuid() != 0:
        leave_out("netns", "hosts of their own are made by root only, and not with RONDE_NO_NETNS=1")
    number = next(_numbers)
    names = (f"rondepy{os.getpid()}-{number}-a", f"rondepy{os.getpid()}-{number}-b")
    addresses = ("10.76.0.1", "10.76.0.2")
    with contextlib.ExitStack() as stack:
        # The path of a Unix socket has 107 bytes, of which pytest's folders leave too few.
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="r-")))
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        ip("link", "add", "v0", "netns", names[0], "type", "veth", "peer", "name", "v0", "netns", names[1])
        for name, address in zip(names, addresses):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "v0")
            ip("-n", name, "link", "set", "v0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        cases = "\n".join(f"{address}) name={name};;" for name, address in zip(names, addresses))
        script(folder / "enter", ENTER)
        script(folder / "ssh", SSH.format(folder=folder, cases=cases, enter=folder / "enter"))
        yield TwoHosts(addresses, folder, names)


def script(path: pathlib.Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
