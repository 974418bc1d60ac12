"""Where tasks of an elastic job connect: which are accepted, and how a command runs there. Without Spark itself."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
import resource
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from ronde.cluster.frames import SOCKET
from ronde.processes import own_host
from ronde.run import CALL
from ronde.spark import host_task, hub
from ronde.spark.host_task import Host, HostPlan, drawn_token, remove_token, token_folder
from ronde.spark.hub import Hub
from test_run import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT_S = 120


class Context:
    """What a host asks its task's context for."""

    def taskAttemptId(self) -> int:  # noqa: N802 -- Spark's name
        return 7

    def resources(self) -> dict[str, Any]:
        return {}


class Place:
    """A driver's end: the folder of a call, and a hub."""

    def __init__(self, folder: pathlib.Path, run_id: str) -> None:
        self.folder = folder / "call"
        self.folder.mkdir(mode=0o700)
        (self.folder / CALL).write_bytes(b"the call")
        make = [os.environ["RONDE_BIN"], "certs", "once", "--job", "j", "--sidecars", "0-0", str(folder / "certs")]
        subprocess.run(make, check=True, capture_output=True)
        identity = folder / "certs" / "sidecar-0"
        self.hub = Hub("127.0.0.1", identity, self.folder / SOCKET, lambda: None)
        address, authority = ("127.0.0.1", self.hub.port), (identity / "ca.pem").read_text()
        self.plan = HostPlan(run_id, b"the call", address, authority, own_host())

    def shell(self, command: str, host: str = "spark-7") -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "ronde.cluster.remote_shell", str(self.folder), host, command]
        pipe = subprocess.PIPE
        return subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@pytest.fixture
def place(home: pathlib.Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    # Each test's own: the host of the last test may still end, and it removes the token of its run.
    run_id = f"test-{uuid.uuid4().hex}"
    # The path of a Unix socket has 107 bytes, of which pytest's folders leave too few.
    with tempfile.TemporaryDirectory(prefix="rs-") as name:
        made = Place(pathlib.Path(name), run_id)
        yield made
        made.hub.close()
    remove_token(run_id)


def serving(place: Place) -> threading.Thread:
    """Serves as a host, whose token the driver knows."""
    token = drawn_token(place.plan.run_id)
    assert token is not None
    place.hub.add_token(token)
    thread = threading.Thread(target=lambda: Host(place.plan, Context()).serve(), daemon=True)
    thread.start()
    wait_until(lambda: "spark-7" in place.hub.hosts())
    return thread


def test_a_command_runs_in_the_task(place: Place) -> None:
    thread = serving(place)
    file = place.folder / "result.0"
    shell = place.shell(f"cat; echo out; echo err >&2; echo found > {file}; exit 3")
    out, err = shell.communicate("typed " * 100_000 + "\n", timeout=TIMEOUT_S)
    assert (shell.returncode, out, err) == (3, "typed " * 100_000 + "\nout\n", "err\n")
    assert file.read_text() == "found\n"
    # The task is there for the next command.
    wait_until(lambda: "spark-7" in place.hub.hosts())
    assert place.shell("exit 0").wait(TIMEOUT_S) == 0
    place.hub.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert not token_folder(place.plan.run_id).exists()


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """Lets descriptors that this process opens be 1024 or above."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"LEFT OUT: a process may have only {hard} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    with open(os.devnull, "rb") as nothing:
        held = [os.dup(nothing.fileno()) for _ in range(1024)]
    yield
    for descriptor in held:
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_command_runs_in_a_process_with_many_open_files(many_open_files: None, place: Place) -> None:
    del many_open_files
    serving(place)
    out, err = place.shell("cat; echo err >&2").communicate("typed " * 100_000, timeout=TIMEOUT_S)
    assert (out, err) == ("typed " * 100_000, "err\n")


def test_a_task_whose_connection_ends_without_a_command_connects_again(place: Place) -> None:
    thread = serving(place)
    first = place.hub._hosts["spark-7"]
    with place.hub._lock:
        connections = [each for each in place.hub._connections if isinstance(each, ssl.SSLSocket)]
    for connection in connections:
        connection.shutdown(socket.SHUT_RDWR)
    wait_until(lambda: place.hub._hosts.get("spark-7") not in (None, first))
    assert place.shell("exit 0").wait(TIMEOUT_S) == 0
    place.hub.close()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()


def test_a_listener_that_cannot_accept_is_logged_once(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub, "_RETRY_S", 0.01)

    class Failing:
        failures = 0

        def accept(self) -> Any:
            self.failures += 1
            if self.failures == 3:
                place.hub.close()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    listener: Any = Failing()
    place.hub._accept(listener, lambda connection: None)
    assert listener.failures == 3
    assert caplog.text.count("Too many open files") == 1


def test_the_end_of_the_remote_shell_ends_the_command(place: Place) -> None:
    serving(place)
    mark = place.folder / "pid"
    shell = place.shell(f"echo $$ > {mark}; exec sleep 600")
    wait_until(lambda: mark.exists() and mark.read_text().strip())
    shell.kill()
    shell.wait(TIMEOUT_S)
    wait_until(lambda: not pathlib.Path("/proc", mark.read_text().strip()).exists())


def test_a_host_that_is_not_there_is_named(place: Place) -> None:
    shell = place.shell("exit 0", "spark-9")
    _, err = shell.communicate(timeout=TIMEOUT_S)
    assert shell.returncode == 255
    assert "the process that is spark-9 has ended" in err or "has failed" in err


@pytest.mark.parametrize(
    "hello",
    [{"host": "h", "node": "n", "token": "00" * 32}, {"host": "h", "token": 5}, [], "x" * 100_000, "deep", None],
)
def test_who_has_no_token_is_no_host(place: Place, hello: Any) -> None:
    token = drawn_token(place.plan.run_id)
    assert token is not None
    place.hub.add_token(token)
    context = ssl.create_default_context(cadata=place.plan.authority)
    context.check_hostname = False
    with (
        contextlib.suppress(ConnectionError, ssl.SSLError),
        context.wrap_socket(socket.create_connection(place.plan.driver, TIMEOUT_S)) as connection,
    ):
        line = (
            {None: b"\xff", "deep": b"[" * 60_000}.get(hello) if hello in (None, "deep") else json.dumps(hello).encode()
        )
        assert line is not None
        connection.sendall(line + b"\n")
        assert connection.recv(100) in (b"", b"n")
    assert place.hub.hosts() == {}


def trickle(connection: ssl.SSLSocket) -> None:
    """Sends a line whose pieces come within the time limit, but not the line."""
    for _ in range(TIMEOUT_S):
        connection.sendall(b"[")
        time.sleep(0.5)


def test_who_sends_its_hello_slowly_is_closed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_HELLO_TIMEOUT_S", 2.0)
    context = ssl.create_default_context(cadata=place.plan.authority)
    context.check_hostname = False
    with (
        context.wrap_socket(socket.create_connection(place.plan.driver, TIMEOUT_S)) as connection,
        pytest.raises((ConnectionError, ssl.SSLError)),
    ):
        trickle(connection)
    assert place.hub.hosts() == {}


def test_connections_beyond_the_limit_are_closed_and_the_place_is_free_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place.hub, "_unknown", threading.BoundedSemaphore(1))
    with (
        socket.create_connection(place.plan.driver, TIMEOUT_S),
        socket.create_connection(place.plan.driver, TIMEOUT_S) as second,
    ):
        assert second.recv(1) == b""
    serving(place)


def test_a_token_that_never_reached_the_driver_is_replaced(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_task, "_KNOWN_TIMEOUT_S", 0.0)
    run_id = place.plan.run_id
    lost = drawn_token(run_id)
    assert drawn_token(run_id) is None
    assert sorted(path.name for path in token_folder(run_id).iterdir()) == ["token"]
    with pytest.raises(host_task.UnknownTokenError):
        Host(place.plan, Context()).serve()
    token = drawn_token(run_id, replaces=True)
    assert token not in (None, lost)
    assert (token_folder(run_id) / "token").read_bytes() == token


def test_the_driver_of_another_authority_is_rejected(place: Place, tmp_path: pathlib.Path) -> None:
    make = [os.environ["RONDE_BIN"], "certs", "once", "--job", "j", "--sidecars", "0-0", str(tmp_path / "certs")]
    subprocess.run(make, check=True, capture_output=True)
    authority = (tmp_path / "certs" / "sidecar-0" / "ca.pem").read_text()
    assert drawn_token(place.plan.run_id) is not None
    other = HostPlan(place.plan.run_id, b"", place.plan.driver, authority, own_host())
    with pytest.raises(ssl.SSLError, match="certificate verify failed"):
        Host(other, Context()).serve()
