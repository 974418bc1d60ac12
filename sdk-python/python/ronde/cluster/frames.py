"""Frames between a remote shell and the process that runs its command: a kind, a length, and bytes."""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing import IO

_HEADER = struct.Struct("<cI")
# Input of the command and its end; its output and error; a file that a worker has left; its exit status; nothing.
INPUT, OUTPUT, ERROR, FILE, STATUS, ALIVE = b"i", b"o", b"e", b"f", b"x", b"a"
_BYTES_MAX = 1 << 30
# Where remote shells find the program, in the folder of the call.
SOCKET = "hosts.socket"


class _Sends(Protocol):
    def sendall(self, content: bytes) -> None:
        """Sends all of it."""


class Sender:
    """Sends frames from several threads.

    connection -- a socket
    """

    def __init__(self, connection: _Sends) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: bytes, content: bytes = b"") -> None:
        """Sends a frame. Raises OSError if the connection has ended."""
        with self._lock:
            self._connection.sendall(_HEADER.pack(kind, len(content)) + content)


def receive(stream: IO[bytes]) -> tuple[bytes, bytes] | None:
    """Returns kind and content of the next frame; None at the end of the connection. Raises OSError."""
    header = _exactly(stream, _HEADER.size)
    if header is None:
        return None
    kind, length = _HEADER.unpack(header)
    if length > _BYTES_MAX:
        raise OSError(f"a frame of {length} bytes: not one of ronde")
    content = _exactly(stream, length)
    return None if content is None else (kind, content)


def _exactly(stream: IO[bytes], length: int) -> bytes | None:
    content = stream.read(length)
    return content if len(content) == length else None
