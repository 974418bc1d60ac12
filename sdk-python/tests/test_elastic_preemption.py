"""SIGTERM to a worker of an elastic job, with an agent of the test."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
from conftest import PACKAGE

from ronde.elastic.preemption import notices_taken

# What a worker does: it gets SIGTERM within the block, and prints a line if it goes on.
WORKER = """
import os, signal
from ronde.elastic.preemption import notices_taken
with notices_taken():
    os.kill(os.getpid(), signal.SIGTERM)
    print("trains on", flush=True)
print("handler is", "default" if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else "kept")
"""


class Agent:
    """A socket that answers each report with one line."""

    def __init__(self, folder: pathlib.Path, answer: bytes) -> None:
        self.path = str(folder / "notice.sock")
        self.reports: list[Any] = []
        self._answer = answer
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.path)
        self._listener.listen(1)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._listener.accept()
        with connection, connection.makefile("rb") as lines:
            self.reports.append(json.loads(lines.readline()))
            connection.sendall(self._answer)


def run(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE), "RONDE_WORKER": "3", **variables}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_worker_trains_on_after_a_notice(tmp_path: pathlib.Path) -> None:
    agent = Agent(tmp_path, b'{"end_now": false}\n')
    ended = run(WORKER, RONDE_NOTICE_SOCKET=agent.path)
    assert (ended.returncode, ended.stdout) == (0, "trains on\nhandler is default\n"), ended
    assert agent.reports == [{"worker": 3}]


@pytest.mark.parametrize("answer", [b'{"end_now": true}\n', b"nonsense\n", b"[]\n", b""])
def test_a_worker_whose_end_was_ordered_ends(tmp_path: pathlib.Path, answer: bytes) -> None:
    """Also one whose agent does not answer."""
    agent = Agent(tmp_path, answer)
    ended = run(WORKER, RONDE_NOTICE_SOCKET=agent.path)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, ""), ended


def test_without_an_agent_sigterm_ends_the_worker(tmp_path: pathlib.Path) -> None:
    for path in ("", str(tmp_path / "missing")):
        ended = run(WORKER, RONDE_NOTICE_SOCKET=path)
        assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, ""), ended


def test_a_handler_of_the_script_is_kept(tmp_path: pathlib.Path) -> None:
    program = "import signal\nsignal.signal(signal.SIGTERM, lambda *_: print('own handler'))\n" + WORKER
    ended = run(program, RONDE_NOTICE_SOCKET=Agent(tmp_path, b'{"end_now": true}\n').path)
    assert (ended.returncode, ended.stdout) == (0, "own handler\ntrains on\nhandler is kept\n"), ended


def test_another_thread_takes_no_notices(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Only the main thread can handle signals."""
    monkeypatch.setenv("RONDE_NOTICE_SOCKET", str(tmp_path / "missing"))
    seen: list[Any] = []

    def block() -> None:
        with notices_taken():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=block)
    thread.start()
    thread.join(60)
    assert seen == [signal.getsignal(signal.SIGTERM)]
