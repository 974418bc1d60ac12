"""A key-value store over HTTP, on a loopback address.

Keys lie in scopes: `/scope/key`. Requests and answers are authenticated by a key in the variable `_HOROVOD_SECRET_KEY`,
which processes inherit; they are not encrypted, so nothing listens on other addresses.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import http.server
import os
import threading
import urllib.parse
from typing import TYPE_CHECKING, Any

from horovod.runner.common.util import secret

if TYPE_CHECKING:
    from collections.abc import Sequence

    from horovod.runner.common.util.hosts import SlotInfo

DIGEST_HEADER = "X-Horovod-Digest"
OK, REJECTED, NOT_FOUND, FAILED = 200, 403, 404, 500
_LOOPBACK = "127.0.0.1"
_VALUE_BYTES_MAX = 1 << 20
_REQUEST_TIMEOUT_S = 600
_making_key = threading.Lock()


def digest(method: str, path: str, body: bytes) -> str:
    """Returns the text that authenticates a request or an answer. Makes the key if the variable is not set."""
    return base64.b64encode(secret.compute_digest(_key(), f"{method} {path}\n".encode() + body)).decode()


def _key() -> bytes:
    """Returns the key in the variable. Makes it if the variable is not set, one for all threads."""
    with _making_key:
        text = os.environ.get(secret.HOROVOD_SECRET_KEY)
        if text is None:
            text = os.environ[secret.HOROVOD_SECRET_KEY] = base64.b64encode(secret.make_secret_key()).decode()
    return base64.b64decode(text)


class Store:
    """Values by scope and key. All methods may be called in any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, dict[str, bytes]] = {}

    def get(self, scope: str, key: str) -> bytes | None:
        """Returns a value; None if there is none."""
        with self._lock:
            return self._values.get(scope, {}).get(key)

    def put(self, scope: str, key: str, value: bytes) -> None:
        """Stores a value."""
        with self._lock:
            self._values.setdefault(scope, {})[key] = value

    def delete(self, scope: str) -> None:
        """Removes a scope."""
        with self._lock:
            self._values.pop(scope, None)


class RendezvousHandler(http.server.BaseHTTPRequestHandler):
    """Answers the requests of a `RendezvousServer`. A subclass may give scopes another meaning."""

    timeout = _REQUEST_TIMEOUT_S

    def get_value(self, scope: str, key: str) -> bytes | None:
        """Returns the value of a key; None if there is none."""
        return self._store.get(scope, key)

    def put_value(self, scope: str, key: str, value: bytes) -> None:
        """Stores the value of a key."""
        self._store.put(scope, key, value)

    def do_GET(self) -> None:
        """Answers with a value; 404 if there is none."""
        self._handle(lambda scope, key, _: self.get_value(scope, key))

    def do_PUT(self) -> None:
        """Stores a value."""
        self._handle(lambda scope, key, body: self.put_value(scope, key, body) or b"")  # type: ignore[func-returns-value]

    def do_DELETE(self) -> None:
        """Removes a scope."""
        self._handle(lambda scope, _, __: self._store.delete(scope) or b"")  # type: ignore[func-returns-value]

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""

    @property
    def _store(self) -> Store:
        store: Store = self.server.store  # type: ignore[attr-defined]
        return store

    def _handle(self, act: Any) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length <= _VALUE_BYTES_MAX else b""
        given = self.headers.get(DIGEST_HEADER, "")
        if length > _VALUE_BYTES_MAX or not hmac.compare_digest(given, digest(self.command, self.path, body)):
            self._answer(REJECTED, b"the request is not authenticated by the key of the job")
            return
        scope, key = map(urllib.parse.unquote, self.path.strip("/").partition("/")[::2])
        try:
            value = act(scope, key, body)
        except Exception as error:
            self._answer(FAILED, f"{type(error).__name__}: {error}".encode())
            return
        self._answer(NOT_FOUND if value is None else OK, value or b"")

    def _answer(self, status: int, body: bytes) -> None:
        with contextlib.suppress(OSError):  # who asked has left
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header(DIGEST_HEADER, digest(str(status), self.path, body))
            self.end_headers()
            self.wfile.write(body)


class RendezvousServer:
    """Serves a key-value store in a thread.

    verbose -- ignored
    """

    def __init__(self, verbose: int = 0) -> None:
        del verbose
        self._server: http.server.ThreadingHTTPServer | None = None

    def start(self, handler_cls: type[RendezvousHandler] = RendezvousHandler) -> int:
        """Starts the server on 127.0.0.1. Returns its port. Processes that start after this inherit the key."""
        _key()
        server = http.server.ThreadingHTTPServer((_LOOPBACK, 0), handler_cls)
        server.store = Store()  # type: ignore[attr-defined]
        self._server = server
        threading.Thread(target=server.serve_forever, name="rendezvous server", daemon=True).start()
        return int(server.server_address[1])

    def init(self, host_alloc_plan: Sequence[SlotInfo]) -> None:
        """Does nothing with the slots of a round: workers ask for theirs."""

    def stop(self) -> None:
        """Stops the server. May be called again."""
        server, self._server = self._server, None
        if server is not None:
            # A request that waits for the next round may be the caller.
            threading.Thread(target=_close, args=(server,), name="end of the rendezvous server", daemon=True).start()


def _close(server: http.server.ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()
