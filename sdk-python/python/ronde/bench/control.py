"""The control channel from the benchmark to its ranks: lines of JSON over a Unix socket in a private directory.

A rank that waits for its turn blocks in `receive` and uses no CPU time. The socket is a file, so it reaches ranks in
other network namespaces. When the benchmark ends, for whatever reason, its ranks detect this and end, too.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import time
from typing import TYPE_CHECKING, Any, Callable

from ronde.bench.errors import BenchError

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Sequence

LINE_BYTES_MAX = 1 << 20
# Long enough to import PyTorch on a machine with few cores.
START_SECONDS_MAX = 180.0
# Long enough for the longest turn: some hundred MB on a slow machine, with every element checked.
TURN_SECONDS_MAX = 900.0


class Channel:
    """One end of a connection."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream = stream
        self._pending = bytearray()

    @classmethod
    def connect(cls, path: str) -> Channel:
        """Connects a rank's end."""
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.connect(path)
        return cls(stream)

    def send(self, message: dict[str, Any]) -> None:
        """Sends one message."""
        self._stream.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Waits for the next message. Returns None if the peer has closed the connection."""
        while True:
            message = self._take()
            if message is not None:
                return message
            if not self._read():
                return None

    def receive_ready(self) -> tuple[dict[str, Any] | None, bool]:
        """Reads from a readable socket. Returns a message if one is complete, and whether the peer has closed."""
        is_open = self._read()
        return self._take(), not is_open

    def fileno(self) -> int:
        """Returns the descriptor, for selectors."""
        return self._stream.fileno()

    def close(self) -> None:
        """Closes the connection."""
        self._stream.close()

    def _read(self) -> bool:
        try:
            data = self._stream.recv(1 << 16)
        except ConnectionResetError:
            return False
        self._pending += data
        if len(self._pending) > LINE_BYTES_MAX:
            raise BenchError(f"a message is longer than {LINE_BYTES_MAX} bytes")
        return bool(data)

    def _take(self) -> dict[str, Any] | None:
        line, found, rest = self._pending.partition(b"\n")
        if not found:
            return None
        self._pending = rest
        message: dict[str, Any] = json.loads(line)
        return message


class Listener:
    """The listening socket for the ranks of one group."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen()
        self._socket.settimeout(0.2)

    def gather(self, ranks: int, check: Callable[[], None]) -> tuple[list[Channel], list[dict[str, Any]]]:
        """Waits for all ranks. Returns their channels and first messages, in rank order. `check` may raise to abort."""
        deadline = time.monotonic() + START_SECONDS_MAX
        found: dict[int, tuple[Channel, dict[str, Any]]] = {}
        while len(found) < ranks:
            check()
            if time.monotonic() > deadline:
                missing = sorted(set(range(ranks)) - set(found))
                raise BenchError(f"ranks {missing} have not started within {START_SECONDS_MAX:.0f} s")
            with contextlib.suppress(socket.timeout):
                stream, _ = self._socket.accept()
                stream.settimeout(START_SECONDS_MAX)
                channel = Channel(stream)
                hello = channel.receive()
                if hello is None or "error" in hello:
                    raise BenchError((hello or {}).get("error", "a rank ended while it started"))
                stream.settimeout(None)
                found[hello["rank"]] = (channel, hello)
        ordered = [found[rank] for rank in sorted(found)]
        return [channel for channel, _ in ordered], [hello for _, hello in ordered]

    def close(self) -> None:
        """Stops accepting ranks."""
        self._socket.close()
        self.path.unlink()


def ask(channels: Sequence[Channel], message: dict[str, Any]) -> list[dict[str, Any]]:
    """Sends all channels the same message and waits for all answers. Returns them in the order of the channels.

    Raises BenchError at the first failure of a rank: the others may wait for it forever.
    """
    for rank, channel in enumerate(channels):
        try:
            channel.send(message)
        except OSError as error:
            raise BenchError(f"rank {rank} has ended ({error})") from error
    answers: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + TURN_SECONDS_MAX
    with selectors.DefaultSelector() as selector:
        for rank, channel in enumerate(channels):
            selector.register(channel, selectors.EVENT_READ, rank)
        while len(answers) < len(channels):
            ready = selector.select(deadline - time.monotonic())
            if not ready:
                missing = sorted(set(range(len(channels))) - set(answers))
                raise BenchError(f"ranks {missing} have not answered within {TURN_SECONDS_MAX:.0f} s: {message}")
            for key, _ in ready:
                answer, has_ended = channels[key.data].receive_ready()
                if answer is not None and "error" in answer:
                    raise BenchError(f"rank {key.data}: {answer['error']}")
                if answer is not None:
                    answers[key.data] = answer
                    selector.unregister(key.fileobj)
                elif has_ended:
                    raise BenchError(f"rank {key.data} has ended")
    return [answers[rank] for rank in range(len(channels))]
