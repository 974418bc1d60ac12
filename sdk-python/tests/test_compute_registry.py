"""The registry of compute jobs, and the restriction of servers to the loopback. Neither needs TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Callable

import pytest
from conftest import PACKAGE, leave_out

from ronde.data import compute_registry
from ronde.data.compute_registry import ComputeClient, ComputeService, TimeoutException

if TYPE_CHECKING:
    from collections.abc import Iterator

KEY = bytes(range(32))
LOOPBACK = PACKAGE / "ronde" / "tensorflow" / "data" / "loopback.py"


@pytest.fixture
def service() -> Iterator[ComputeService]:
    found = ComputeService(2, 2, KEY)
    yield found
    found.close()


@pytest.fixture
def client(service: ComputeService) -> ComputeClient:
    return ComputeClient([f"127.0.0.1:{service.port}"], KEY)


def test_dispatchers_are_found_when_they_register(client: ComputeClient) -> None:
    found: list[str] = []
    waiter = threading.Thread(target=lambda: found.append(client.wait_for_dispatcher_registration(1, 60)))
    waiter.start()
    client.register_dispatcher(1, "grpc://localhost:5")
    waiter.join(60)
    assert found == ["grpc://localhost:5"]
    client.register_dispatcher(1, "grpc://localhost:5")  # the same again
    with pytest.raises(ValueError, match="already been registered under different address"):
        client.register_dispatcher(1, "grpc://localhost:6")
    for number in (-1, 2):
        with pytest.raises(IndexError, match="there is no dispatcher"):
            client.register_dispatcher(number, "grpc://localhost:5")
    with pytest.raises(IndexError):
        client.wait_for_dispatcher_registration(7, 1)
    with pytest.raises(TimeoutException, match="dispatcher 0 has not registered"):
        client.wait_for_dispatcher_registration(0, 0)


def test_a_timeout_is_kept(service: ComputeService, client: ComputeClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is shorter than the server's wait for a request."""
    waits: list[float] = []
    wait_for = service._changed.wait_for

    def waited(is_ready: Callable[[], bool], seconds: float) -> bool:
        waits.append(seconds)
        return wait_for(is_ready, seconds)

    monkeypatch.setattr(service._changed, "wait_for", waited)
    with pytest.raises(TimeoutException, match=r"within 0\.2 s"):
        client.wait_for_dispatcher_registration(0, 0.2)
    assert 0 <= max(waits) <= 0.2, waits


def test_a_request_cannot_wait_for_long(service: ComputeService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_registry, "_WAIT_S", 0.01)
    for wait in (-1, 3600, float("nan"), "5", None):
        request = {"kind": "wait_for_dispatcher", "dispatcher": 0, "wait": wait}
        assert service.answer(request) == {"ready": False, "address": None}


def test_workers_are_counted_once(client: ComputeClient) -> None:
    client.register_worker_for_dispatcher(0, 0)
    client.register_worker_for_dispatcher(0, 0)
    with pytest.raises(TimeoutException, match="not all workers of dispatcher 0"):
        client.wait_for_dispatcher_worker_registration(0, 0)
    client.register_worker_for_dispatcher(0, 2)
    client.wait_for_dispatcher_worker_registration(0, 0)
    with pytest.raises(ValueError, match="has its 2 workers already"):
        client.register_worker_for_dispatcher(0, 4)


def test_shutdown_ends_the_waits(client: ComputeClient) -> None:
    waiter = threading.Thread(target=client.wait_for_shutdown)
    waiter.start()
    client.shutdown()
    waiter.join(60)
    assert not waiter.is_alive()


def test_nobody_is_served_without_the_key(service: ComputeService, client: ComputeClient) -> None:
    with pytest.raises(ConnectionError, match="the key may be that of another compute job"):
        ComputeClient(("127.0.0.1", service.port), KEY[::-1]).register_dispatcher(0, "grpc://evil:1")
    with pytest.raises(TimeoutException):
        client.wait_for_dispatcher_registration(0, 0)
    for line in (b"", b"\n", b"\x80pickle\n", b"0" * 10_000, b"a " + json.dumps({"kind": "shutdown"}).encode() + b"\n"):
        with socket.create_connection(("127.0.0.1", service.port), timeout=30) as connection:
            assert len(connection.makefile("rb").readline()) == 65
            # It may have refused, and closed, before it has read all.
            with contextlib.suppress(OSError):
                connection.sendall(line)
                connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    client.register_dispatcher(0, "grpc://localhost:5")


def test_answers_of_somebody_without_the_key_are_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"0" * 64 + b"\n")
                connection.makefile("rb").readline()
                connection.sendall(b"0" * 64 + b' {"ready": true, "address": "grpc://evil:1"}\n')

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(ConnectionError, match="does not have the key"):
            ComputeClient([listener.getsockname()], KEY).wait_for_dispatcher_registration(0, 1)


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="16 bytes or more"):
        ComputeClient("localhost:1", b"short")
    with pytest.raises(ValueError, match="give 1 or more"):
        ComputeService(0, 1, KEY)
    with pytest.raises(ConnectionError, match="no registry of the compute job answers"):
        ComputeClient({"lo": [("127.0.0.1", 1)]}, KEY).shutdown()


# Runs in a network namespace: the server listens on all addresses, as TensorFlow's do.
LISTENS = """
import importlib.util, pathlib, socket, subprocess, sys
for command in ("ip link set lo up", "ip addr add 192.0.2.1/32 dev lo", "ip -6 addr add 2001:db8::1/128 dev lo nodad"):
    subprocess.run(command.split(), check=True)
spec = importlib.util.spec_from_file_location("loopback", sys.argv[1])
loopback = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loopback)
listener = socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
port = listener.getsockname()[1]

def reached(address):
    try:
        with socket.create_connection((address, port), timeout=1) as connection:
            listener.settimeout(10)
            accepted, _ = listener.accept()
            accepted.sendall(b"x" * 100000)
            accepted.close()
            received = 0
            while chunk := connection.recv(65536):
                received += len(chunk)
            return received == 100000
    except OSError:
        return False

ADDRESSES = ["127.0.0.1", "127.0.0.9", "::1", "192.0.2.1", "2001:db8::1"]
assert all(map(reached, ADDRESSES)), "not all are reached without the filter"
early = socket.create_connection(("192.0.2.1", port))
accepted, _ = listener.accept()
loopback.accept_loopback_only(port)
assert accepted.recv(1) == b"", "a connection that was accepted before stayed open"
print([reached(address) for address in ADDRESSES])
try:
    loopback.accept_loopback_only(1)
except RuntimeError as error:
    print(error)
"""


def test_servers_are_restricted_to_the_loopback() -> None:
    if os.geteuid() != 0:
        leave_out("namespaces", "network namespaces need root")
    command = ["unshare", "--net", sys.executable, "-c", LISTENS, str(LOOPBACK)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "[True, True, True, False, False]" in done.stdout
    assert "does not listen on port 1, so nothing was restricted" in done.stdout
