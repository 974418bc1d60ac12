"""Identifies processes and hosts, from `/proc`."""

from __future__ import annotations

import contextlib
import os
import pathlib
from typing import NamedTuple

_PROC = pathlib.Path("/proc")
# Ancestors of a process that are searched for its launcher; shells and wrappers are a few.
_ANCESTORS_MAX = 64


class ProcessIdentity(NamedTuple):
    """A process of this host.

    pid     -- its ID, which the kernel reuses
    started -- when it started, in clock ticks since the host's boot
    pids    -- the namespace of its ID: containers count processes by themselves
    """

    pid: int
    started: int
    pids: str


class HostIdentity(NamedTuple):
    """What processes share if one sidecar can serve them.

    name    -- the host's name, for messages; two hosts may have the same
    boot    -- the kernel's ID of this boot: processes of other hosts have another one
    network -- the network namespace: it makes hosts of containers and tests

    The mount namespace is no part of it: containers of one host may share a directory, and a rank that cannot open the
    session directory of rank 0 reports that.
    """

    name: str
    boot: str
    network: str

    def is_same(self, other: HostIdentity) -> bool:
        """Returns whether processes of both can share a sidecar. The name does not count."""
        return self[1:] == other[1:]


def identity_of(pid: int) -> ProcessIdentity:
    """Returns the identity of a process. Raises ProcessLookupError or FileNotFoundError if there is none."""
    return ProcessIdentity(int(pid), int(_fields(pid)[19]), _own_pids())


def is_alive(process: ProcessIdentity) -> bool:
    """Returns whether the process exists and has not exited. One of another namespace, that is not seen here, may."""
    if process.pids != _own_pids():
        return True
    try:
        fields = _fields(process.pid)
    except (FileNotFoundError, ProcessLookupError):
        return False
    return int(fields[19]) == process.started and fields[0] not in {"Z", "X"}


def own_host() -> HostIdentity:
    """Returns the identity of this process's host."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return HostIdentity(os.uname().nodename, boot, os.readlink(_PROC / "self/ns/net"))


def launcher_of_this_host(variable: str) -> ProcessIdentity:
    """Returns the process that started this one and others as ranks: the first ancestor without the variable.

    variable -- in which the launcher passes the rank; shells and other wrappers between it and this process have it

    An ancestor whose environment this user cannot read, such as Slurm's daemon, is the launcher.
    """
    prefix = f"{variable}=".encode()
    pid = os.getppid()
    for _ in range(_ANCESTORS_MAX):
        parent = int(_fields(pid)[1])
        if parent == 0 or not _has_variable(pid, prefix):
            break
        pid = parent
    return identity_of(pid)


def _own_pids() -> str:
    return os.readlink(_PROC / "self/ns/pid")


def _has_variable(pid: int, prefix: bytes) -> bool:
    with contextlib.suppress(OSError):
        variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
        return any(each.startswith(prefix) for each in variables)
    return False


def _fields(pid: int) -> list[str]:
    """Returns the fields of `/proc/PID/stat` from the third one, the state."""
    return (_PROC / str(int(pid)) / "stat").read_text().rpartition(")")[2].split()
