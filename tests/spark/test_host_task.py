"""What tasks of an elastic job do, without Spark: results, tokens, and the end of a command."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pathlib
import pickle
import threading
import time
import types
from typing import TYPE_CHECKING, Any

import pytest
from ronde.cluster import agent as agents
from ronde.cluster import frames
from ronde.errors import RondeError
from ronde.private_folder import PrivateFolder
from ronde.run import REPORT, RESULT, _elastic_results, with_rank
from ronde.spark import elastic, host_task

if TYPE_CHECKING:
    from collections.abc import Mapping


class Taken:
    """An agent whose worker has left a file, and ends when it has been taken."""

    def __init__(self) -> None:
        self.is_taken = threading.Event()

    def wait(self) -> int:
        assert self.is_taken.wait(60)
        return 0

    def taken(self) -> Mapping[str, bytes]:
        if self.is_taken.is_set():
            return {}
        self.is_taken.set()
        return {"result.0": b"seven"}

    def read(self, is_error: bool) -> bytes:
        return b""

    def write(self, content: bytes) -> None:
        """Does nothing."""


class Slow:
    """A sender that sends a file only after the command has ended."""

    def __init__(self, ended: threading.Event) -> None:
        self.ended, self.sent = ended, list[bytes]()

    def send(self, kind: bytes, content: bytes = b"") -> None:
        del content
        if kind == frames.FILE:
            assert self.ended.wait(60)
            # Time for the last frame to overtake it.
            threading.Event().wait(0.2)
        self.sent.append(kind)


def test_a_result_that_is_taken_when_the_command_ends_is_sent_before_the_status() -> None:
    agent: Any = Taken()
    sender: Any = Slow(threading.Event())
    command = host_task._Command(agent, sender, io.BytesIO())
    sender.ended = command._ended
    command.run()
    assert sender.sent == [frames.FILE, frames.STATUS]


@pytest.mark.parametrize(
    ("ranks", "size", "missing"),
    [
        ([0, 1, 2], 3, ""),
        ([1, 3], 4, "0, 2"),
        ([None, 0], 1, ""),
        ([0, 0, 2], 3, "1"),
        # The highest rank has ended its process.
        ([0, 1], 3, "2"),
    ],
)
def test_missing_results_of_an_elastic_job_are_named(
    tmp_path: pathlib.Path, ranks: list[int | None], size: int, missing: str
) -> None:
    tmp_path.chmod(0o700)
    with contextlib.closing(PrivateFolder(tmp_path)) as folder:
        for worker, rank in enumerate(ranks):
            content = with_rank(rank, None if rank is None else size, pickle.dumps(worker))
            folder.write(f"{RESULT}.{worker}", content)
        if missing:
            with pytest.raises(RuntimeError, match=f"the ranks {missing}:"):
                _elastic_results(folder, tmp_path)
        else:
            assert sorted(_elastic_results(folder, tmp_path)) == list(range(len(ranks)))


@pytest.mark.parametrize("ranks", [0, 2, 3])
def test_missing_results_of_workers_that_never_connected_are_counted(tmp_path: pathlib.Path, ranks: int) -> None:
    """The launcher's report has 0 ranks if no process has connected."""
    tmp_path.chmod(0o700)
    (tmp_path / REPORT).write_text(json.dumps({"ranks": ranks}))
    with contextlib.closing(PrivateFolder(tmp_path)) as folder:
        for worker in range(2):
            folder.write(f"{RESULT}.{worker}", with_rank(None, None, pickle.dumps(worker)))
        if ranks == 3:
            with pytest.raises(RuntimeError, match="the results of 2 of 3 workers"):
                _elastic_results(folder, tmp_path)
        else:
            assert _elastic_results(folder, tmp_path) == [0, 1]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_job_that_has_shrunk_has_the_results_of_those_that_are_left(tmp_path: pathlib.Path, ranks: int) -> None:
    """Its workers had closed their sessions before, so they know the former size."""
    tmp_path.chmod(0o700)
    (tmp_path / REPORT).write_text(json.dumps({"ranks": ranks}))
    with contextlib.closing(PrivateFolder(tmp_path)) as folder:
        for worker in range(2):
            folder.write(f"{RESULT}.{worker}", with_rank(worker, 4, pickle.dumps(worker)))
        if ranks == 4:
            with pytest.raises(RuntimeError, match="the results of the ranks 2, 3"):
                _elastic_results(folder, tmp_path)
        else:
            assert _elastic_results(folder, tmp_path) == [0, 1]


class Hosts:
    """A hub with some hosts."""

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def hosts(self) -> dict[str, str]:
        return dict.fromkeys(self.names, "node")


class Broken:
    """A session that starts no task."""

    def slots(self) -> int:
        return 2

    def start(self, *_: Any) -> None:
        raise OSError("no room")


def job(hosts: list[str], session: Any = None) -> Any:
    made: Any = elastic._Job(session, [], 2, 2, "train", {})
    made._hub = Hosts(hosts)
    return made


@pytest.mark.parametrize(
    ("hosts", "error"),
    [
        (["spark-1"], OSError("no room")),
        # The job has its hosts, so those that settings exclude are not needed.
        (["spark-1", "spark-2"], RondeError("no room", "settings")),
    ],
)
def test_failures_of_tasks_beside_hosts_do_not_end_a_job(
    hosts: list[str], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    made = job(hosts)
    for _ in range(2):
        made._failures = [error] * 5
        made.check()
    assert made._failures == []
    assert caplog.text.count("no room") == 1


def test_failures_without_hosts_end_a_job() -> None:
    made = job([])
    made._failures = [OSError("first")] * 2
    made.check()
    made._failures = [RondeError("not encrypted", "settings")]
    with pytest.raises(RondeError, match="not encrypted"):
        made.check()


def test_a_task_that_cannot_be_started_counts_as_failed_and_not_as_asked() -> None:
    made = job([], Broken())
    made._plan = object()
    with pytest.raises(OSError, match="no room"):
        made._start()
    assert made._tasks == 0
    asking = threading.Thread(target=made._ask, daemon=True)
    asking.start()
    for _ in range(600):
        if made._failures:
            break
        time.sleep(0.1)
    made._ending.set()
    asking.join(60)
    assert str(made._failures[0]) == "no room"
    assert made._tasks == 0


@pytest.mark.parametrize(
    ("size", "least", "most", "found"),
    [(None, None, None, (4, 4, None)), (None, 1, None, (1, 4, None)), (None, 6, 8, (6, 6, 8)), (None, 1, 2, (1, 2, 2))],
)
def test_the_number_of_ranks_is_sparks_within_the_limits(size: Any, least: Any, most: Any, found: Any) -> None:
    session: Any = types.SimpleNamespace(default_size=lambda: 4)
    assert elastic._numbers(session, size, least, most) == found


def test_an_agent_waits_for_no_lock_and_no_call_for_ever(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "_MADE_TIMEOUT_S", 0.2)
    folder = tmp_path / "call"
    folder.mkdir(mode=0o700)
    agent = agents.Agent(str(folder), b"", "spark-1", "")
    with pytest.raises(OSError, match="has had no call"):
        agent.start("true")
    agent.end()
    agent.remove()
    # `remove` has released the lock.
    other = os.open(folder, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(OSError, match="locked"):
        agents.Agent(str(folder), b"", "spark-1", "").start("true")
    os.close(other)
    folder.chmod(0o755)
    with pytest.raises(PermissionError):
        agents.Agent(str(folder), b"", "spark-1", "").start("true")
