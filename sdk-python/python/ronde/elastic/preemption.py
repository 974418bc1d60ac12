"""SIGTERM as a notice that this worker's host is about to be taken away."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

# The socket of the launcher's agent on this host. It exists in elastic jobs.
_SOCKET_VARIABLE = "RONDE_NOTICE_SOCKET"
# The agent answers within milliseconds.
_ANSWER_S = 2.0


@contextlib.contextmanager
def notices_taken() -> Iterator[None]:
    """Within the block, SIGTERM lets this worker, and those of its host, leave the job at their next commit.

    Does nothing outside of elastic jobs, outside of the main thread, and for a program that handles SIGTERM itself.
    When the launcher ends this worker, or its agent does not answer, SIGTERM ends the process as usual.
    """
    path = os.environ.get(_SOCKET_VARIABLE)
    is_main = threading.current_thread() is threading.main_thread()
    if not path or not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def handle(number: int, _frame: Any) -> None:
        # Nothing is printed here: the signal may have interrupted a write. The launcher prints a notice.
        if _ends_now(path):
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _ends_now(path: str) -> bool:
    """Reports the signal to the agent, and returns whether this process is to end at once."""
    report = {"worker": int(os.environ.get("RONDE_WORKER", "-1"))}
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as agent:
            agent.settimeout(_ANSWER_S)
            agent.connect(path)
            agent.sendall(json.dumps(report).encode() + b"\n")
            with agent.makefile("rb") as lines:
                return bool(json.loads(lines.readline())["end_now"])
    except (OSError, ValueError, KeyError, TypeError):
        return True
