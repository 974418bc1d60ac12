"""torchft's Manager over ronde: replicas that die and return, and torchft's own tests (`make torchft-test`)."""

from __future__ import annotations

import pathlib
import queue
import re
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
import torch
from conftest import ROOT, environment
from torchft.coordination import LighthouseServer

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKERS = pathlib.Path(__file__).parent / "workers"
TIMEOUT_S = 90
STEPS = 12


class Replica:
    """A process of a replica, whose lines can be waited for."""

    def __init__(self, name: str, lighthouse: str, folder: pathlib.Path) -> None:
        command = [sys.executable, str(WORKERS / "replica.py"), name, lighthouse, str(STEPS), str(folder)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, env=environment(), cwd=ROOT, **pipes)
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line)
        self._queue.put(None)

    def until(self, text: str) -> None:
        """Waits for a line."""
        while True:
            line = self._queue.get(timeout=TIMEOUT_S)
            assert line is not None, f"no line {text!r}:\n{''.join(self.lines)}"
            self.lines.append(line)
            if text in line:
                return

    def finish(self) -> str:
        """Returns the output of a replica that ends without an error."""
        while (line := self._queue.get(timeout=TIMEOUT_S)) is not None:
            self.lines.append(line)
        assert self.process.wait(TIMEOUT_S) == 0, "".join(self.lines)
        return "".join(self.lines)

    def kill(self) -> None:
        """Ends the process by SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(TIMEOUT_S)


@pytest.fixture
def lighthouse() -> Iterator[LighthouseServer]:
    """A lighthouse of torchft, which waits for a replica as long as that sends heartbeats."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=30_000, heartbeat_timeout_ms=2_000)
    yield server
    server.shutdown()


def test_a_replica_dies_and_returns(tmp_path: pathlib.Path, lighthouse: LighthouseServer) -> None:
    """The weights are equal in the end, and those of a replica that was alone when the other was dead."""
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"
    for step in (0, 4, 8):
        (tmp_path / f"hold-{step}").touch()
    first, second = (Replica(name, address, tmp_path) for name in "ab")
    replicas = [first, second]
    try:
        for each in replicas:
            each.until("begins")
        (tmp_path / "hold-0").unlink()
        for each in replicas:
            each.until("committed step 4 with 2")
        second.kill()
        (tmp_path / "hold-4").unlink()
        first.until("committed step 8 with 1")
        replicas.append(again := Replica("b", address, tmp_path))
        again.until("b begins")
        (tmp_path / "hold-8").unlink()
        outputs = [first.finish(), again.finish()]
    finally:
        for each in replicas:
            each.kill()
    committed = [[int(step) for step in re.findall(r"committed step (\d+)", output)] for output in outputs]
    assert committed[0] == list(range(1, STEPS + 1)), outputs[0]
    assert committed[1][-1] == STEPS, outputs[1]
    assert committed[1][0] > 8, outputs[1]
    states = [torch.load(tmp_path / f"{name}.pt") for name in "ab"]
    for name, weights in states[0]["model"].items():
        assert torch.equal(weights, states[1]["model"][name]), name


@pytest.mark.parametrize("tests", ["process_group_test", "manager_integ_test"])
def test_torchfts_own_tests(tests: str) -> None:
    """Those of process groups, and of the Manager, with the group of ronde in place of Gloo's."""
    command = [sys.executable, str(WORKERS / "own_tests.py"), tests]
    done = subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=3 * TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = re.search(r"(\d+) of torchft's own tests have run, 0 failed", done.stdout)
    assert run is not None, done.stdout
    assert int(run[1]) >= (17 if tests == "process_group_test" else 6), done.stdout
