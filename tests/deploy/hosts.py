"""Hosts with names: network namespaces on a bridge, each with a file of hosts. Needs root."""

from __future__ import annotations

import os
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Sequence

from ronde.bench import network

# What containers run: Python with its packages, the program with its plugins, and this checkout.
ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("RONDE_BIN", "/usr/bin/ronde")).resolve()
PROGRAMS = sorted({sys.base_prefix, sys.prefix, str(BINARY.parent), str(ROOT)})


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
        lines = ["set -e", f"hostname {self.names[host][0].split('.')[0]}"]
        if mounts:
            # Places that do not exist here are made in folders that nobody else sees.
            tops = {top for top in ("/run/", "/home/") for _, place, _ in mounts if place.startswith(top)} | {"/run/"}
            lines.extend(f"mount -t tmpfs -o mode=755 tmpfs {top}" for top in sorted(tops))
            lines.extend(f"mkdir -p {shlex.quote(place)}" for _, place, _ in mounts if place.startswith(tuple(tops)))
            lines.extend(opened(PROGRAMS))
        for source, place, options in [*bind, *mounts]:
            lines.append(f"mount --bind {shlex.quote(source)} {shlex.quote(place)}")
            if options:
                lines.append(f"mount -o remount,bind,{options} {shlex.quote(place)}")
        script = "\n".join([*lines, 'exec "$@"'])
        return super().on(host, ["unshare", "--mount", "--uts", "sh", "-c", script, "sh", *command])


def opened(folders: Sequence[str]) -> list[str]:
    """The lines of a script that let every user reach these folders: those above them that only their owner may enter
    are replaced by others, which contain nothing else."""
    closed = {
        folder: next((p for p in reversed(pathlib.Path(folder).parents) if not p.stat().st_mode & 1), None)
        for folder in folders
    }
    wanted = [folder for folder in folders if closed[folder] is not None]
    kept = [f"/run/kept-{number}" for number in range(len(wanted))]
    lines = [f"mkdir {place}\nmount --bind {shlex.quote(folder)} {place}" for folder, place in zip(wanted, kept)]
    for above in {str(closed[folder]) for folder in wanted}:
        lines.append(f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(above)}")
    for folder, place in zip(wanted, kept):
        lines.append(f"mkdir -p {shlex.quote(folder)}\nmount --move {place} {shlex.quote(folder)}")
    return lines


def run(command: Sequence[str], timeout_s: float, **options: object) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; its output is text."""
    done: subprocess.CompletedProcess[str] = subprocess.run(  # type: ignore[call-overload]
        command, capture_output=True, text=True, check=False, timeout=timeout_s, **options
    )
    return done
