"""Notifies a worker of changed hosts: a service in the worker, and the driver's client for it.

Messages are JSON with an HMAC of the worker's key. The service listens on loopback addresses only, because they are not
encrypted. Jobs of `ronde run` use none of this: their sidecars notify the workers.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import socket
import socketserver
import threading
from typing import TYPE_CHECKING, Any

from horovod.runner.common.util import secret
from horovod.runner.elastic import constants
from horovod.runner.elastic.constants import NOTIFICATION_TIMEOUT_SECS
from horovod.runner.http.http_client import put_data_into_kvstore
from ronde.elastic import HostUpdateResult, NotificationManager

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PUT_WORKER_ADDRESSES = "worker_addresses"
GET_RANK_AND_SIZE = "rank_and_size"
_LOOPBACK = "127.0.0.1"
_LINE_BYTES_MAX = 4096
_log = logging.getLogger("horovod.elastic")


class WorkerNotificationManager(NotificationManager):
    """Notifies the states of this process. With `init`, a driver in another process of this host can notify it."""

    def __init__(self) -> None:
        super().__init__()
        self._service: WorkerNotificationService | None = None

    def init(
        self,
        rendezvous_addr: str | None = None,
        rendezvous_port: int | None = None,
        nic: str | None = None,
        hostname: str | None = None,
        local_rank: int | None = None,
    ) -> None:
        """Starts the service once, and registers its address at a rendezvous server of this host.

        Arguments that are missing are HOROVOD_GLOO_RENDEZVOUS_ADDR, HOROVOD_GLOO_RENDEZVOUS_PORT, HOROVOD_GLOO_IFACE,
        HOROVOD_HOSTNAME and HOROVOD_LOCAL_RANK, which a program gives its workers. Does nothing without the address and
        port of the server: sidecars notify the workers of `ronde run`. Raises OSError if the server cannot be reached.
        """
        rendezvous_addr = rendezvous_addr or os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT") if rendezvous_port is None else rendezvous_port
        if self._service is not None or not rendezvous_addr or not port:
            return
        hostname = hostname or os.environ.get("HOROVOD_HOSTNAME")
        local_rank = int(os.environ.get("HOROVOD_LOCAL_RANK", "0")) if local_rank is None else local_rank
        nic = nic or os.environ.get("HOROVOD_GLOO_IFACE")
        service = WorkerNotificationService(secret.make_secret_key(), nic, self)
        content = {"addresses": service.addresses(), "key": base64.b64encode(service.key).decode()}
        key = f"{hostname}:{local_rank}"
        try:
            put_data_into_kvstore(rendezvous_addr, int(port), PUT_WORKER_ADDRESSES, key, json.dumps(content).encode())
        except BaseException:
            service.shutdown()
            raise
        self._service = service

    def shutdown(self) -> None:
        """Stops the service."""
        service, self._service = self._service, None
        if service is not None:
            service.shutdown()


class WorkerNotificationService:
    """Receives notifications in a thread, on a loopback address.

    key     -- authenticates the messages
    nic     -- ignored: only this host can reach the service
    manager -- is notified of each message
    """

    NAME = "worker notification service"

    def __init__(self, key: bytes, nic: str | None, manager: NotificationManager) -> None:
        del nic
        self.key = key
        self._server = _Server((_LOOPBACK, 0), _Connection)
        self._server.received = self._received
        self._thread = threading.Thread(target=self._server.serve_forever, name=self.NAME, daemon=True)
        self._thread.start()
        self._manager = manager

    def addresses(self) -> dict[str, list[tuple[str, int]]]:
        """Returns the address and port, by interface."""
        return {"lo": [(_LOOPBACK, self.get_port())]}

    def get_port(self) -> int:
        """Returns the port."""
        return int(self._server.server_address[1])

    def shutdown(self) -> None:
        """Stops the service."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _received(self, line: bytes) -> bytes:
        message = _opened(line, self.key)
        if message is None:
            _log.warning("a message of another sender was rejected: its HMAC is not that of this worker's key")
            return b"rejected\n"
        self._manager.handle_hosts_updated(float(message["timestamp"]), int(message["change"]))
        return b"received\n"


class WorkerNotificationClient:
    """Sends notifications to the service of a worker on this host.

    addresses -- as `WorkerNotificationService.addresses` returns them
    key       -- the service's
    verbose, match_intf -- ignored
    """

    def __init__(
        self,
        addresses: Mapping[str, Sequence[tuple[str, int]]],
        key: bytes,
        verbose: int = 0,
        match_intf: bool = False,
    ) -> None:
        del verbose, match_intf
        self._addresses = [(str(host), int(port)) for listed in addresses.values() for host, port in listed]
        self._key = key
        others = [host for host, _ in self._addresses if not host.startswith("127.")]
        if others:
            raise ValueError(
                f"{', '.join(others)}: notifications are not encrypted, so they stay on this host (127.0.0.1); start "
                "workers on other hosts with `ronde run --host-discovery-script`, whose sidecars notify them"
            )

    def notify_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Notifies the worker of changed hosts. Raises OSError if it cannot be reached, or rejects the message."""
        line = _sealed({"timestamp": timestamp, "change": update_res}, self._key)
        timeout_s = constants.current("NOTIFICATION_TIMEOUT_SECS", globals())
        failure: OSError | None = None
        for address in self._addresses:
            try:
                with socket.create_connection(address, timeout_s) as connection:
                    connection.sendall(line)
                    answer = connection.makefile("rb").readline(_LINE_BYTES_MAX)
            except OSError as error:
                failure = error
                continue
            if answer != b"received\n":
                raise OSError(f"the worker at {address[0]}:{address[1]} rejected the notification: {answer!r}")
            return
        raise failure or OSError("the worker has no address")


class HostsUpdatedRequest:
    """A notification: when the hosts have changed, and how (of `HostUpdateResult`)."""

    def __init__(self, timestamp: float, res: int = HostUpdateResult.no_update) -> None:
        self.timestamp = timestamp
        self.res = res


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    received: Any


class _Connection(socketserver.StreamRequestHandler):
    timeout = 10

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            line = self.rfile.readline(_LINE_BYTES_MAX)
            self.wfile.write(self.server.received(line))  # type: ignore[attr-defined]


def _sealed(message: dict[str, Any], key: bytes) -> bytes:
    body = json.dumps(message).encode()
    digest = base64.b64encode(secret.compute_digest(key, body))
    return digest + b" " + body + b"\n"


def _opened(line: bytes, key: bytes) -> dict[str, Any] | None:
    """Returns the message of a line; None if it was not made with the key."""
    digest, _, body = line.rstrip(b"\n").partition(b" ")
    try:
        given = base64.b64decode(digest, validate=True)
    except ValueError:
        return None
    if not secret.check_digest(key, body, given):
        return None
    message: dict[str, Any] = json.loads(body)
    return message


__all__ = [
    "GET_RANK_AND_SIZE",
    "NOTIFICATION_TIMEOUT_SECS",
    "PUT_WORKER_ADDRESSES",
    "HostUpdateResult",
    "HostsUpdatedRequest",
    "WorkerNotificationClient",
    "WorkerNotificationManager",
    "WorkerNotificationService",
]
