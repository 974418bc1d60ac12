"""Where the tasks of an elastic job connect to the program, and the launcher's remote shells find them."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import pathlib
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any

from ronde.spark import sealed

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger("ronde.spark")
_HELLO_BYTES_MAX = 1 << 16
# For the handshake and the hello together.
_HELLO_TIMEOUT_S = 30.0
_RETRY_S = 0.1
_CANNOT_ACCEPT = (
    "the driver cannot accept a connection of the elastic job's tasks or remote shells: %s. It tries again every %s s; "
    "if the reason is too many open files, raise the limit (ulimit -n) of the driver"
)
# Connections that have not proved that they are tasks.
_UNKNOWN_MAX = 64


class _Host:
    """A task that waits for a command, or runs one."""

    def __init__(self, name: str, node: str) -> None:
        self.name, self.node = name, node
        self.request: bytes = b""
        self.shell: socket.socket | None = None
        self.wake, self.woken = socket.socketpair()


class Hub:
    """Listens for tasks over TLS, and for remote shells on a socket in a private folder.

    address  -- where tasks connect; a free port of it is taken
    identity -- the directory with the certificate and the key of this end
    path     -- of the socket for remote shells
    changed  -- called when hosts have come or gone
    """

    def __init__(self, address: str, identity: pathlib.Path, path: pathlib.Path, changed: Callable[[], None]) -> None:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.load_cert_chain(identity / "cert.pem", identity / "key.pem")
        self._changed = changed
        self._lock = threading.Lock()
        self._hosts: dict[str, _Host] = {}
        self._tokens: set[bytes] = set()
        self._unknown = threading.BoundedSemaphore(_UNKNOWN_MAX)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._tasks = socket.create_server((address, 0), family=family)
        self.port: int = self._tasks.getsockname()[1]
        self._shells = socket.socket(socket.AF_UNIX)
        self._shells.bind(str(path))
        os.chmod(path, 0o600)
        self._shells.listen()
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        for listener, serve in ((self._tasks, self._serve_task), (self._shells, self._serve_shell)):
            threading.Thread(target=self._accept, args=(listener, serve), daemon=True).start()

    def close(self) -> None:
        """Ends all connections: tasks end then, and remote shells."""
        with self._lock:
            self._is_closed = True
            connections = [*self._connections, self._tasks, self._shells]
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def add_token(self, token: bytes) -> None:
        """Lets tasks with this token be hosts."""
        with self._lock:
            self._tokens.add(token)

    def hosts(self) -> dict[str, str]:
        """Returns the hosts, and the names of the nodes that they are on."""
        with self._lock:
            return {name: host.node for name, host in self._hosts.items()}

    def _accept(self, listener: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        is_failing = False
        while True:
            try:
                connection, _ = listener.accept()
                is_failing = False
            except OSError as error:
                if self._is_closed:
                    return
                if not is_failing:
                    _log.warning(_CANNOT_ACCEPT, error, _RETRY_S)
                is_failing = True
                time.sleep(_RETRY_S)  # such as too many open files, until others are closed
                continue
            is_task = listener is self._tasks
            if is_task and not self._unknown.acquire(blocking=False):
                connection.close()
                continue
            try:
                with self._lock:
                    if self._is_closed:
                        raise OSError("closed")
                    self._connections.add(connection)
                threading.Thread(target=self._serve, args=(connection, serve), daemon=True).start()
            except (OSError, RuntimeError):  # closed, or too many threads
                if is_task:
                    self._unknown.release()
                with self._lock:
                    self._connections.discard(connection)
                connection.close()

    def _serve(self, connection: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        try:
            # An end that is gone, or that is none of this run's. Deeply nested JSON is a RecursionError.
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
                serve(connection)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _serve_shell(self, connection: socket.socket) -> None:
        """Hands a remote shell to the task that it names."""
        line = _line(connection, time.monotonic() + _HELLO_TIMEOUT_S)
        connection.settimeout(None)
        request = json.loads(line)
        with self._lock:
            host = self._hosts.get(request["host"])
            if host is None or host.shell is not None or self._is_closed:
                return
            host.request, host.shell = line, connection.dup()
        host.wake.sendall(b"!")

    def _serve_task(self, plain: socket.socket) -> None:
        connection: ssl.SSLSocket | None = None
        try:
            try:
                until = time.monotonic() + _HELLO_TIMEOUT_S
                plain.settimeout(_HELLO_TIMEOUT_S)
                connection = self._context.wrap_socket(plain, server_side=True)
                with self._lock:
                    self._connections.add(connection)
                host = self._greeted(connection, until)
            finally:
                self._unknown.release()
            if host is not None:
                self._wait(connection, host)
        finally:
            if connection is not None:
                with self._lock:
                    self._connections.discard(connection)
                connection.close()

    def _greeted(self, connection: ssl.SSLSocket, until: float) -> _Host | None:
        """Returns the host that a connection is; None if it has no token of this run."""
        hello: dict[str, Any] = json.loads(_line(connection, until))
        token = bytes.fromhex(hello["token"])
        with self._lock:
            is_known = any(hmac.compare_digest(token, known) for known in self._tokens)
        if not is_known:
            connection.sendall(b"n")
            return None
        host = _Host(str(hello["host"]), str(hello["node"]))
        connection.sendall(b"y")
        connection.settimeout(None)
        sealed.keep_alive(connection)
        return host

    def _wait(self, connection: ssl.SSLSocket, host: _Host) -> None:
        """Waits until a remote shell wants the host, or it is gone, and connects them."""
        with self._lock:
            self._hosts[host.name] = host
        self._changed()
        try:
            ready = sealed.wait([connection, host.woken])
            if host.woken.fileno() in ready and host.shell is not None:
                connection.sendall(host.request)
                sealed.copy(connection, host.shell)
        finally:
            with self._lock:
                if self._hosts.get(host.name) is host:
                    del self._hosts[host.name]
            if host.shell is not None:
                host.shell.close()
            host.wake.close()
            host.woken.close()
            self._changed()


def _line(connection: socket.socket, until: float) -> bytes:
    """Returns a line of at most _HELLO_BYTES_MAX bytes. Reads nothing after it.

    until -- the time of the monotonic clock at which it must be complete

    Raises ValueError for a longer line or one that ends early, and TimeoutError.
    """
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(until - time.monotonic(), 0.001))
        piece = connection.recv(1)
        if not piece or len(line) > _HELLO_BYTES_MAX:
            raise ValueError("no line")
        line += piece
    return line
