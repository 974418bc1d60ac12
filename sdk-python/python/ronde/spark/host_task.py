"""A task of an elastic job: a host with one slot. It connects to the driver and runs the launcher's agent.

The driver listens with a certificate of an authority that is made for the run, and the task's closure has that
authority, which is public. A task proves that it is one by a token, which a task of this host has drawn. It is in a
file of this user alone on the host, and the driver has got it as the result of that task, over Spark's connections. So
tasks of another host than the driver's run only if these are encrypted and authenticated.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import shutil
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any

from ronde.cluster import frames
from ronde.cluster.agent import Agent
from ronde.errors import RondeError
from ronde.private_folder import PrivateFolder, own_base
from ronde.processes import HostIdentity, own_host
from ronde.spark import sealed
from ronde.spark.failures import CannotBeginError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SCHEMA = "kind string, host string, content binary"
TOKEN, ENDED, REFUSED = "token", "ended", "refused"
_TOKEN_BYTES = 32
_CONNECT_TIMEOUT_S = 30.0
# The driver learns a token when the task that has drawn it has ended.
_KNOWN_TIMEOUT_S = 60.0
_RETRY_S = 0.5
_ALIVE_S = 5.0
_PIECE_BYTES = 1 << 20
_END_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class HostPlan:
    """A run, for its hosts. It contains no key.

    run_id      -- a name that no other run has; not secret
    call        -- the function and its arguments, pickled by `ronde.run`
    driver      -- where the driver listens
    authority   -- the certificate of its authority, as PEM
    driver_host -- the driver's host
    unprotected -- why Spark's connections must not carry a key between hosts; "" if they may
    """

    run_id: str
    call: bytes = field(repr=False)
    driver: tuple[str, int]
    authority: str
    driver_host: HostIdentity
    unprotected: str = ""


class UnknownTokenError(Exception):
    """The driver does not know the token of this host: the task that drew it ended before its result arrived."""


class HostTask:
    """What a task does, as a function for `mapInArrow`. Its row has the columns of SCHEMA.

    plan -- the run
    """

    def __init__(self, plan: HostPlan) -> None:
        self._plan = plan

    def __call__(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Serves as a host until the driver ends the run; or draws the token of this host, for the driver."""
        import pyarrow
        from pyspark import TaskContext

        for _ in batches:
            pass
        try:
            _check_channel(self._plan)
            kind, content = TOKEN, drawn_token(self._plan.run_id)
            if content is None:
                try:
                    Host(self._plan, TaskContext.get()).serve()
                    kind, content = ENDED, b""
                except UnknownTokenError:
                    content = drawn_token(self._plan.run_id, replaces=True)
        except RondeError as error:
            # As a result: Spark would repeat a task that raises an error.
            kind, content = REFUSED, str(CannotBeginError(error)).encode()
        columns = [pyarrow.array([kind]), pyarrow.array([own_host().name]), pyarrow.array([content], pyarrow.binary())]
        yield pyarrow.RecordBatch.from_arrays(columns, ["kind", "host", "content"])


def _check_channel(plan: HostPlan) -> None:
    if plan.unprotected and not own_host().is_same(plan.driver_host):
        raise RondeError(
            f"{own_host().name} is another host than the driver's, and ronde sends no key over Spark's connections: "
            f"{plan.unprotected}. Let Spark encrypt its connections, with spark.authenticate and either "
            "spark.ssl.rpc.enabled and a trust store (from Spark 4.0 on), or spark.network.crypto.enabled and "
            "spark.network.crypto.saslFallback=false (docs/SPARK.md), or run the program by `ronde run --min-np`, "
            "which reaches hosts by ssh (docs/ELASTIC.md)",
            "settings",
        )


def token_folder(run_id: str) -> pathlib.Path:
    """Returns the folder of this user on this host in which the token of a run is."""
    return own_base() / f"ronde-spark-{os.geteuid()}-{run_id}"


def drawn_token(run_id: str, replaces: bool = False) -> bytes | None:
    """Draws the token of this host, and writes it. Returns None if there is one. Raises OSError.

    replaces -- whether to draw another one where there is one: that one never reached the driver
    """
    path = token_folder(run_id)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    with contextlib.closing(PrivateFolder(path)) as folder:
        token = secrets.token_bytes(_TOKEN_BYTES)
        try:
            if replaces:
                folder.replace(TOKEN, token)
            else:
                folder.write_whole(TOKEN, token)
        except FileExistsError:
            return None
    return token


def remove_token(run_id: str) -> None:
    """Removes the token of this host; another task of it may have done so."""
    # Also what a task that was killed while it drew one has left.
    shutil.rmtree(token_folder(run_id), ignore_errors=True)


class Host:
    """A host with one slot, for the launcher of an elastic job.

    context -- the task's context
    """

    def __init__(self, plan: HostPlan, context: Any) -> None:
        self._plan = plan
        self._name = f"spark-{context.taskAttemptId()}"
        gpu = context.resources().get("gpu")
        self._gpus = "" if gpu is None else ",".join(map(str, gpu.addresses))
        # The driver removes the file when the run ends.
        with contextlib.closing(PrivateFolder(token_folder(plan.run_id))) as folder:
            self._token = folder.read(TOKEN)

    def serve(self) -> None:
        """Runs the commands that the driver sends, one after the other, until the run ends.

        Raises UnknownTokenError if the driver does not accept the token of this host within a minute.
        """
        known_until = time.monotonic() + _KNOWN_TIMEOUT_S
        while True:
            try:
                connection = self._connected()
            except (ConnectionError, ssl.SSLEOFError):
                # The driver has too many connections that have not proved themselves, or ends.
                if time.monotonic() > known_until:
                    raise
                time.sleep(_RETRY_S)
                continue
            if connection is None:
                break
            with connection:
                if not self._is_accepted(connection):
                    if time.monotonic() > known_until:
                        raise UnknownTokenError
                    time.sleep(_RETRY_S)
                    continue
                known_until = time.monotonic() + _KNOWN_TIMEOUT_S
                has_served = self._serve(connection)
            if not has_served:
                time.sleep(_RETRY_S)  # a driver that drops connections would be flooded with new ones
        remove_token(self._plan.run_id)

    def _connected(self) -> ssl.SSLSocket | None:
        """Connects to the driver. Returns None if it does not listen any more."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # The authority is that of this run alone, and has issued one certificate.
        context.check_hostname = False
        context.load_verify_locations(cadata=self._plan.authority)
        try:
            plain = socket.create_connection(self._plan.driver, _CONNECT_TIMEOUT_S)
        except ConnectionRefusedError:
            return None
        try:
            return context.wrap_socket(plain)
        except BaseException:
            plain.close()
            raise

    def _is_accepted(self, connection: ssl.SSLSocket) -> bool:
        hello = {"host": self._name, "token": self._token.hex(), "node": own_host().name, "pid": os.getpid()}
        connection.sendall(json.dumps(hello).encode() + b"\n")
        answer = connection.recv(1)
        sealed.keep_alive(connection)
        connection.settimeout(None)
        return answer == b"y"

    def _serve(self, connection: ssl.SSLSocket) -> bool:
        """Waits for a command, and runs it. Returns whether one came before the connection ended."""
        plain, other = socket.socketpair()
        copying = threading.Thread(target=sealed.copy, args=(connection, other), daemon=True)
        copying.start()
        with plain, plain.makefile("rb") as stream:
            sender = frames.Sender(plain)
            line = stream.readline()
            if not line:
                return False
            command = json.loads(line)
            agent = Agent(command["folder"], self._plan.call, command["host"], self._gpus)
            try:
                agent.start(command["command"])
                _Command(agent, sender, stream).run()
            finally:
                agent.end()
                agent.remove()
                # What was sent last, such as the exit status, is on its way.
                plain.shutdown(socket.SHUT_WR)
                copying.join(_END_TIMEOUT_S)
        return True


class _Command:
    """Connects a command of an agent to the remote shell."""

    def __init__(self, agent: Agent, sender: frames.Sender, stream: IO[bytes]) -> None:
        self._agent, self._sender, self._stream = agent, sender, stream
        self._ended = threading.Event()

    def run(self) -> None:
        """Returns when the command has ended, or the connection."""
        threads = [
            threading.Thread(target=self._pass_on, args=(kind, is_error), daemon=True)
            for kind, is_error in ((frames.OUTPUT, False), (frames.ERROR, True))
        ]
        watching = threading.Thread(target=self._watch, daemon=True)
        for thread in (*threads, watching):
            thread.start()
        threading.Thread(target=self._feed, daemon=True).start()
        status = self._agent.wait()
        self._ended.set()
        with contextlib.suppress(OSError):  # the remote shell has ended
            for thread in threads:
                thread.join(_END_TIMEOUT_S)
            # It may have taken a result that it has not sent, and STATUS is the last frame. It ends when it has sent
            # that, or the connection has ended.
            watching.join()
            self._send_files()
            self._sender.send(frames.STATUS, str(status).encode())

    def _feed(self) -> None:
        """Passes input on. The end of the connection ends the command."""
        with contextlib.suppress(OSError, ValueError):
            while (frame := frames.receive(self._stream)) is not None:
                if frame[0] == frames.INPUT:
                    self._agent.write(frame[1])
        if not self._ended.is_set():
            self._agent.write(b"")
            if not self._ended.wait(_END_TIMEOUT_S):
                self._agent.end()

    def _pass_on(self, kind: bytes, is_error: bool) -> None:
        with contextlib.suppress(OSError):
            while content := self._agent.read(is_error):
                self._sender.send(kind, content)

    def _watch(self) -> None:
        """Sends what workers leave, and shows that this task lives."""
        with contextlib.suppress(OSError):
            sent_at = time.monotonic()
            while not self._ended.wait(_RETRY_S):
                self._send_files()
                if time.monotonic() - sent_at > _ALIVE_S:
                    self._sender.send(frames.ALIVE)
                    sent_at = time.monotonic()

    def _send_files(self) -> None:
        for name, content in self._agent.taken().items():
            self._sender.send(frames.FILE, name.encode() + b"\n" + content)
