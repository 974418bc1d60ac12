"""The registry in which dispatchers and workers of tf.data's service find each other, and its client.

Messages are lines of JSON. Each connection begins with a random number of the server; a request and its answer are
authenticated with HMAC-SHA256 of that number and the line, by the key of the configuration file. Nothing is pickled,
and nothing secret is sent: requests are numbers and addresses. They are not encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import socketserver
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_LINE_BYTES_MAX = 4096
_NONCE_BYTES = 32
_CONNECTIONS_MAX = 1024
_ADDRESS_LENGTH_MAX = 300
# A connection carries one request, which waits for at most this long; the client asks again.
_WAIT_S = 5.0
_IO_TIMEOUT_S = 10.0


class TimeoutException(Exception):  # noqa: N818 (Horovod's name)
    """A dispatcher or a worker has not registered in time."""


class ComputeService:
    """The registry of one compute job. It answers until `close`.

    dispatchers            -- the number of dispatchers
    workers_per_dispatcher -- the number of workers of each
    key                    -- the secret of the job, of at least 16 bytes
    nics                   -- ignored; Horovod's argument
    host                   -- the address to listen on; default: the loopback

    Raises ValueError for invalid numbers and a short key, and OSError if the address cannot be used.
    """

    def __init__(
        self, dispatchers: int, workers_per_dispatcher: int, key: bytes, nics: Any = None, *, host: str = "127.0.0.1"
    ) -> None:
        del nics
        if dispatchers < 1 or workers_per_dispatcher < 1:
            raise ValueError(f"{dispatchers} dispatchers with {workers_per_dispatcher} workers each; give 1 or more")
        self._key = _checked(key)
        self._workers_per_dispatcher = workers_per_dispatcher
        self._dispatchers: list[str | None] = [None] * dispatchers
        self._workers: list[set[int]] = [set() for _ in range(dispatchers)]
        self._is_shut_down = False
        self._changed = threading.Condition()
        self._connections = threading.BoundedSemaphore(_CONNECTIONS_MAX)
        self._server = _Server((host, 0), self)
        self._thread = threading.Thread(target=self._server.serve_forever, name="ronde-compute-registry", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stops answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Performs one request, and returns the answer.

        One that waits ends after as many seconds as its `wait`, at most a few, with `ready` false.
        """
        kind = request.get("kind")
        if kind == "shutdown":
            with self._changed:
                self._is_shut_down = True
                self._changed.notify_all()
            return {"ready": True}
        if kind == "wait_for_shutdown":
            return {"ready": self._wait(lambda: self._is_shut_down, request)}
        number = request.get("dispatcher")
        if not isinstance(number, int) or not 0 <= number < len(self._dispatchers):
            return {"error": "index", "text": f"there is no dispatcher {number}; there are {len(self._dispatchers)}"}
        return self._answer_of(number, request)

    def _answer_of(self, number: int, request: Mapping[str, Any]) -> dict[str, Any]:
        """Performs a request about one dispatcher."""
        kind = request.get("kind")
        if kind == "register_dispatcher":
            return self._register_dispatcher(number, request.get("address"))
        if kind == "register_worker":
            return self._register_worker(number, request.get("worker"))
        if kind == "wait_for_dispatcher":
            ready = self._wait(lambda: self._dispatchers[number] is not None, request)
            return {"ready": ready, "address": self._dispatchers[number]}
        if kind == "wait_for_workers":
            count = self._workers_per_dispatcher
            return {"ready": self._wait(lambda: len(self._workers[number]) >= count, request)}
        return {"error": "value", "text": f"the registry has no request {kind!r}"}

    def _register_dispatcher(self, number: int, address: Any) -> dict[str, Any]:
        if not isinstance(address, str) or not 0 < len(address) <= _ADDRESS_LENGTH_MAX:
            return {"error": "value", "text": f"a dispatcher's address is a text, not {address!r}"}
        with self._changed:
            known = self._dispatchers[number]
            if known not in (None, address):
                text = f"Dispatcher with id {number} has already been registered under different address {known}"
                return {"error": "value", "text": text}
            self._dispatchers[number] = address
            self._changed.notify_all()
        return {"ready": True}

    def _register_worker(self, number: int, worker: Any) -> dict[str, Any]:
        if not isinstance(worker, int) or not 0 <= worker < 1 << 32:
            return {"error": "value", "text": f"a worker has a number from 0, not {worker!r}"}
        with self._changed:
            workers = self._workers[number]
            if len(workers) >= self._workers_per_dispatcher and worker not in workers:
                text = f"dispatcher {number} has its {self._workers_per_dispatcher} workers already"
                return {"error": "value", "text": text}
            workers.add(worker)
            self._changed.notify_all()
        return {"ready": True}

    def _wait(self, is_ready: Any, request: Mapping[str, Any]) -> bool:
        given = request.get("wait", _WAIT_S)
        # The limit holds for every peer, also for one that sends NaN or no number.
        seconds = given if isinstance(given, (int, float)) and 0 <= given <= _WAIT_S else _WAIT_S
        with self._changed:
            return bool(self._changed.wait_for(is_ready, seconds))


class ComputeClient:
    """Asks the registry of a compute job.

    compute_addresses -- host and port of the registry, or a list of them, of which the first that answers is used; or
                         Horovod's dictionary of lists by network interface
    key               -- the secret of the job
    verbose           -- ignored; Horovod's argument

    Methods raise ConnectionError if no registry answers, or one without this key.
    """

    def __init__(self, compute_addresses: Any, key: bytes, verbose: int = 1) -> None:
        del verbose
        self._addresses = list(_addresses(compute_addresses))
        self._key = _checked(key)

    def register_dispatcher(self, dispatcher_id: int, dispatcher_address: str) -> None:
        """Registers a dispatcher's address, such as `grpc://localhost:5000`.

        Raises IndexError for an invalid number, and ValueError if it is registered under another address.
        """
        self._ask({"kind": "register_dispatcher", "dispatcher": dispatcher_id, "address": dispatcher_address})

    def wait_for_dispatcher_registration(self, dispatcher_id: int, timeout: float) -> str:
        """Returns the address of a dispatcher, once it is registered.

        Raises IndexError for an invalid number, and TimeoutException after `timeout` seconds.
        """
        request = {"kind": "wait_for_dispatcher", "dispatcher": dispatcher_id}
        answer = self._ask_until(request, timeout, f"dispatcher {dispatcher_id} has not registered")
        return str(answer["address"])

    def register_worker_for_dispatcher(self, dispatcher_id: int, worker_id: int) -> None:
        """Registers a worker. Raises IndexError for an invalid dispatcher, and ValueError if it has its workers."""
        self._ask({"kind": "register_worker", "dispatcher": dispatcher_id, "worker": worker_id})

    def wait_for_dispatcher_worker_registration(self, dispatcher_id: int, timeout: float) -> None:
        """Waits until all workers of a dispatcher are registered. Raises as `wait_for_dispatcher_registration`."""
        request = {"kind": "wait_for_workers", "dispatcher": dispatcher_id}
        self._ask_until(request, timeout, f"not all workers of dispatcher {dispatcher_id} have registered")

    def shutdown(self) -> None:
        """Makes all processes of the compute job end."""
        self._ask({"kind": "shutdown"})

    def wait_for_shutdown(self) -> None:
        """Waits until somebody has called `shutdown`. Raises ConnectionError if the registry is gone meanwhile."""
        while not self._ask({"kind": "wait_for_shutdown"})["ready"]:
            pass

    def _ask_until(self, request: Mapping[str, Any], timeout: float, missing: str) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while True:
            rest = max(deadline - time.monotonic(), 0.0)
            answer = self._ask({**request, "wait": min(_WAIT_S, rest)})
            if answer["ready"]:
                return answer
            if time.monotonic() >= deadline:
                raise TimeoutException(f"{missing} within {timeout} s; see whether the compute job has failed")

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        failures = []
        for host, port in self._addresses:
            try:
                with socket.create_connection((host, port), timeout=_IO_TIMEOUT_S) as connection:
                    connection.settimeout(_IO_TIMEOUT_S + _WAIT_S)
                    return _result(_exchange(connection, self._key, request))
            except (OSError, EOFError) as error:
                failures.append(f"{host}:{port}: {error}")
        raise ConnectionError(
            f"no registry of the compute job answers ({'; '.join(failures)}). It ends with the compute job; a registry "
            "on another host needs a compute job with --plaintext-network"
        )


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: tuple[str, int], service: ComputeService) -> None:
        self.service = service
        super().__init__(address, _Handler)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Rejects connections above the limit."""
        return self.service._connections.acquire(blocking=False)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints nothing: a peer that breaks off is its own problem."""


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Answers one request."""
        service = self.server.service
        try:
            with contextlib.suppress(OSError, EOFError, ValueError):
                self.request.settimeout(_IO_TIMEOUT_S)
                nonce = secrets.token_hex(_NONCE_BYTES).encode()
                self.request.sendall(nonce + b"\n")
                with self.request.makefile("rb") as lines:
                    request = _opened(_line(lines), service._key, nonce, b"request")
                answer = service.answer(request)
                self.request.sendall(_sealed(answer, service._key, nonce, b"answer"))
        finally:
            service._connections.release()


def _exchange(connection: socket.socket, key: bytes, request: Mapping[str, Any]) -> dict[str, Any]:
    with connection.makefile("rb") as lines:
        nonce = _line(lines)
        connection.sendall(_sealed(request, key, nonce, b"request"))
        return _opened(_line(lines), key, nonce, b"answer")


def _line(lines: Any) -> bytes:
    line: bytes = lines.readline(_LINE_BYTES_MAX)
    if not line.endswith(b"\n"):
        raise EOFError("the connection ended early; the key may be that of another compute job")
    return line[:-1]


def _sealed(message: Mapping[str, Any], key: bytes, nonce: bytes, direction: bytes) -> bytes:
    body = json.dumps(message).encode()
    return _code(key, nonce, direction, body) + b" " + body + b"\n"


def _opened(line: bytes, key: bytes, nonce: bytes, direction: bytes) -> dict[str, Any]:
    code, _, body = line.partition(b" ")
    if not hmac.compare_digest(code, _code(key, nonce, direction, body)):
        raise EOFError("the peer does not have the key of this compute job")
    message = json.loads(body)
    if not isinstance(message, dict):
        raise EOFError("the peer sent no message")
    return message


def _code(key: bytes, nonce: bytes, direction: bytes, body: bytes) -> bytes:
    return hmac.new(key, b"\n".join([direction, nonce, body]), hashlib.sha256).hexdigest().encode()


def _result(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        kind = IndexError if answer["error"] == "index" else ValueError
        raise kind(str(answer.get("text")))
    return answer


def _checked(key: bytes) -> bytes:
    if not isinstance(key, bytes) or len(key) < 16:
        raise ValueError("the key of a compute job has 16 bytes or more; make it with secrets.token_bytes(32)")
    return key


def _addresses(given: Any) -> Iterable[tuple[str, int]]:
    if isinstance(given, dict):
        given = [address for addresses in given.values() for address in addresses]
    single: Sequence[Any] = [given] if isinstance(given, (str, tuple)) else list(given)
    for each in single:
        host, port = each.rsplit(":", 1) if isinstance(each, str) else each
        yield str(host), int(port)
