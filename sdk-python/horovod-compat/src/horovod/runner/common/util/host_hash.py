"""A unique name for this host, which also differs between containers of one host."""

from __future__ import annotations

import hashlib
import os
import pathlib
import socket

_NAMESPACES = pathlib.Path("/proc/self/ns")


def host_hash(salt: str | None = None) -> str:
    """Returns the host's name without its domain, a dash, and a digest of the full name, namespaces and salt.

    salt -- makes processes of one host appear to be on several
    """
    name = socket.gethostname()
    parts = [name, *_namespaces(), *([salt] if salt else [])]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return f"{name.partition('.')[0]}-{digest}"


def _namespaces() -> list[str]:
    """Returns the Linux namespaces of this process; nothing on systems without them."""
    if not _NAMESPACES.is_dir():
        return []
    return [f"{path.name}={os.readlink(path)}" for path in sorted(_NAMESPACES.iterdir())]
