"""Hosts with names: network namespaces on a bridge, each with a file of hosts. Needs root."""

from __future__ import annotations

import pathlib
import shlex
import subprocess
from collections.abc import Sequence

from ronde.bench import network


class Hosts(network.Network):
    """Hosts that reach each other by these names.

    names -- one or more names of each host, the first also its host name
    folder -- for files of these hosts; its path has no blanks
    """

    def __init__(self, names: Sequence[Sequence[str]], folder: pathlib.Path) -> None:
        super().__init__(len(names), folder)
        self.names = names
        self._file = folder / "hosts"
        lines = [f"{self.address(host)} {' '.join(found)}" for host, found in enumerate(names)]
        self._file.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        # Only the names may decide.
        (folder / "nsswitch.conf").write_text("hosts: files\npasswd: files\ngroup: files\n")
        self._folder = folder

    def on(self, host: int, command: Sequence[str], mounts: Sequence[tuple[str, str, str]] = ()) -> list[str]:
        """The command line that runs a command on a host, in a mount namespace of its own.

        mounts -- (folder or file, place, options) that the command finds there
        """
        bind = [(str(self._folder / name), f"/etc/{name}", "") for name in ("hosts", "nsswitch.conf")]
        lines = ["set -e", f"hostname {self.names[host][0]}"]
        for source, place, options in [*bind, *mounts]:
            lines.append(f"mount --bind {shlex.quote(source)} {shlex.quote(place)}")
            if options:
                lines.append(f"mount -o remount,bind,{options} {shlex.quote(place)}")
        script = "\n".join([*lines, 'exec "$@"'])
        return super().on(host, ["unshare", "--mount", "--uts", "sh", "-c", script, "sh", *command])


def run(command: Sequence[str], timeout_s: float, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; its output is text."""
    done: subprocess.CompletedProcess[str] = subprocess.run(  # type: ignore[call-overload]
        command, capture_output=True, text=True, check=False, timeout=timeout_s, **options
    )
    return done
