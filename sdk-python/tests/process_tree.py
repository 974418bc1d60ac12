"""Processes of a job by their parents: an agent starts a sidecar and its workers."""

from __future__ import annotations

import contextlib
import pathlib


def parent(pid: int) -> int:
    """Returns the parent of a process. Raises OSError if it has ended."""
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def sidecar_beside(worker: int) -> int | None:
    """Returns the process of a worker's sidecar; None if it has none. Raises OSError if the worker has ended."""
    agent = parent(worker)
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if b"sidecar" in words[1:2] and parent(int(path.name)) == agent:
                return int(path.name)
    return None
