"""Copies between a TLS connection and a plain socket of this host, in one thread: OpenSSL's connections need that."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_PIECE_BYTES = 1 << 16
# What waits in one direction while the other side does not read.
_BUFFER_BYTES = 1 << 20
_KEEPALIVE_IDLE_S, _KEEPALIVE_INTERVAL_S, _KEEPALIVE_PROBES = 10, 5, 3


def keep_alive(connection: socket.socket) -> None:
    """Lets a connection fail within half a minute when its other end is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVE_PROBES)


def copy(sealed: ssl.SSLSocket, plain: socket.socket) -> None:
    """Copies both ways until one of the two ends; delivers what has come from it, and closes both."""
    with sealed, plain, contextlib.suppress(OSError):
        sealed.setblocking(False)
        plain.setblocking(False)
        from_sealed, from_plain = _Direction(sealed, plain), _Direction(plain, sealed)
        while not (from_sealed.is_done() or from_plain.is_done()):
            directions = (from_sealed, from_plain)
            if not any(direction.step() for direction in directions):
                reading = [direction.source for direction in directions if direction.has_room()]
                writing = [direction.target for direction in directions if direction.waiting]
                # TLS may have to read before it can write.
                wait([*reading, *([sealed] if from_plain.waiting else [])], writing)


def wait(reading: Iterable[socket.socket], writing: Iterable[socket.socket] = ()) -> set[int]:
    """Waits until one of the sockets can be read or written. Returns the descriptors of those that can.

    In a process with many open files a descriptor may be 1024 or above, which `select.select` does not take.
    """
    poll = select.poll()
    events: dict[int, int] = {}
    for sockets, event in ((reading, select.POLLIN), (writing, select.POLLOUT)):
        for each in sockets:
            events[each.fileno()] = events.get(each.fileno(), 0) | event
    for descriptor, wanted in events.items():
        poll.register(descriptor, wanted)
    return {descriptor for descriptor, _ in poll.poll()}


class _Direction:
    def __init__(self, source: socket.socket, target: socket.socket) -> None:
        self.source, self.target = source, target
        self.waiting = bytearray()
        self._has_ended = False

    def has_room(self) -> bool:
        return not self._has_ended and len(self.waiting) < _BUFFER_BYTES

    def is_done(self) -> bool:
        return self._has_ended and not self.waiting

    def step(self) -> bool:
        """Reads and writes what is possible now. Returns whether something was."""
        moved = False
        if self.has_room():
            with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                content = self.source.recv(_PIECE_BYTES)
                self._has_ended = not content
                self.waiting += content
                moved = True
        if self.waiting:
            with contextlib.suppress(BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                sent = self.target.send(self.waiting[:_PIECE_BYTES])
                del self.waiting[:sent]
                moved = moved or sent > 0
        return moved
