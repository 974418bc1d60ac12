"""Measures CPU time of process trees."""

from __future__ import annotations

import ctypes
import os
import pathlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_libc = ctypes.CDLL(None, use_errno=True)


def tree(roots: Iterable[int]) -> set[int]:
    """Returns the processes and all their descendants."""
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # The name in brackets may contain any character, so count fields from its end.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            parents[int(entry.name)] = int(fields[1])
    found = set(roots)
    while True:
        more = {process for process, parent in parents.items() if parent in found} - found
        if not more:
            return found
        found |= more


def cpu_seconds(processes: Iterable[int]) -> float:
    """Returns user and system time of all threads of live processes, with the scheduler's precision.

    It is the sum that /proc/PID/stat shows in ticks of 10 ms. A process that has ended counts as 0, so take both ends
    of a measurement while all are alive.
    """
    return sum(filter(None, map(_clock_seconds, processes)))


def busy_seconds() -> float:
    """Returns the CPU time of the whole machine since its start, in steps of 10 ms."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def command_line(process: int) -> list[str]:
    """Returns the arguments of a process's command line; none if it has ended."""
    try:
        return pathlib.Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except (FileNotFoundError, ProcessLookupError):
        return []


def _clock_seconds(process: int) -> float | None:
    clock = ctypes.c_int()
    if _libc.clock_getcpuclockid(process, ctypes.byref(clock)) != 0:
        return None
    try:
        return time.clock_gettime(clock.value)
    except OSError:
        return None
