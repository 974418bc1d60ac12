"""`ronde.spark.run` on two executors, processes of Java of their own, with Spark's authentication and encryption."""

from __future__ import annotations

import base64
import os
import pathlib
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from conftest import CLUSTER, session
from test_run import WAIT_MAX_S, check_gone, check_reduced, reduced, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def cluster(home: pathlib.Path, logs: pathlib.Path) -> Iterator[Any]:
    """Two executors, whose events Spark logs."""
    conf = {
        "spark.authenticate": "true",
        "spark.authenticate.secret": "f3a1c0ffee",
        "spark.network.crypto.enabled": "true",
        "spark.network.crypto.saslFallback": "false",
        "spark.io.encryption.enabled": "true",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": logs.as_uri(),
        "spark.eventLog.compress": "false",
    }
    with session(CLUSTER, home, conf) as started:
        yield started


def executor_of() -> tuple[dict[str, Any], str, int]:
    """Where a rank runs: its collectives, its sidecar's directory, and the process of Java above it."""
    found = reduced(3)
    pid = os.getpid()
    while b"CoarseGrainedExecutorBackend" not in pathlib.Path("/proc", str(pid), "cmdline").read_bytes():
        pid = int(pathlib.Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1])
        assert pid > 1, "the rank has no executor above it"
    return found, os.environ["RONDE_SOCKET"], pid


def test_executors_of_one_host_share_a_sidecar(cluster: Any) -> None:
    import ronde.spark

    found = ronde.spark.run(executor_of, num_proc=2)
    check_reduced([each[0] for each in found], 3)
    assert [each[0]["local"] for each in found] == [(0, 2, 0, 1), (1, 2, 0, 1)]
    assert len({socket for _, socket, _ in found}) == 1
    assert len({executor for _, _, executor in found}) == 2
    check_gone([each[0]["pid"] for each in found])


def test_a_rank_that_raises_ends_those_that_wait_for_it(cluster: Any) -> None:
    import ronde.spark

    def train() -> None:
        import ronde.torch as hvd
        import torch

        hvd.init()
        if hvd.rank() == 1:
            raise LookupError("no such digit")
        hvd.allreduce(torch.ones(3))

    failed = (
        r"(?s)^rank 1 of 2 on node (\S+) \(127.0.0.1\), process \d+ failed\n\nTraceback.*LookupError: no such digit$"
    )
    with pytest.raises(ronde.spark.WorkerError, match=failed) as caught:
        ronde.spark.run(train, num_proc=2)
    assert (caught.value.rank, caught.value.host) == (1, os.uname().nodename)


def test_a_killed_rank_ends_the_stage(cluster: Any, tmp_path: pathlib.Path) -> None:
    import ronde.spark

    folder = str(tmp_path)

    def train() -> None:
        import ronde.torch as hvd
        import torch

        hvd.init()
        pathlib.Path(folder, f"pid-{hvd.rank()}").write_text(str(os.getpid()))
        for step in range(100_000):
            if hvd.rank() == 1 and step == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.allreduce(torch.ones(3))

    begun = time.monotonic()
    killed = r"(?s)^rank 1 of 2 on node .* failed\n\nits process was killed by signal 9 \(SIGKILL\)"
    with pytest.raises(ronde.spark.WorkerError, match=killed):
        ronde.spark.run(train, num_proc=2)
    assert time.monotonic() - begun < WAIT_MAX_S
    check_gone([int(path.read_text()) for path in tmp_path.iterdir()])
    check_reduced(ronde.spark.run(reduced, (1,), num_proc=2), 1)


def test_a_killed_task_ends_the_stage(cluster: Any, tmp_path: pathlib.Path) -> None:
    """The process that Spark has started for a task, not that of the rank below it."""
    import ronde.spark

    folder = str(tmp_path)

    def train() -> None:
        import ronde.torch as hvd

        hvd.init()
        pathlib.Path(folder, f"pid-{hvd.rank()}").write_text(str(os.getpid()))
        if hvd.rank() == 1:
            wait_for = pathlib.Path(folder, "pid-0")
            while not wait_for.exists():
                time.sleep(0.1)
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(ronde.spark.WorkerError, match=r"task \d of 2 was lost: "):
        ronde.spark.run(train, num_proc=2)
    check_gone([int(path.read_text()) for path in tmp_path.iterdir()])


def test_the_event_log_has_no_key(cluster: Any, logs: pathlib.Path) -> None:
    """Tokens, by which ranks take their places, are the keys that a job on one host has."""
    import ronde.spark

    def token() -> bytes:
        return pathlib.Path(os.environ["RONDE_TOKEN_FILE"]).read_bytes()

    found = ronde.spark.run(token, num_proc=2)
    assert len(set(found)) == 2
    cluster.range(1).count()
    files = [path for path in logs.rglob("*") if path.is_file()]

    def content() -> bytes:
        return b"".join(path.read_bytes() for path in files)

    wait_until(lambda: b"ronde.spark: token on 2 ranks" in content())
    for key in found:
        assert len(key) >= 16
        for form in (key, key.hex().encode(), base64.b64encode(key)):
            assert form not in content()


def test_an_executor_that_is_lost_is_named(cluster: Any, tmp_path: pathlib.Path) -> None:
    import ronde.spark

    def train() -> None:
        found, _, executor = executor_of()
        if found["rank"] == 1:
            os.kill(executor, signal.SIGKILL)
        time.sleep(600)

    with pytest.raises(ronde.spark.WorkerError, match=r"task \d of 2 was lost: .*[Ee]xecutor"):
        ronde.spark.run(train, num_proc=2)
    # Spark starts another one.
    check_reduced(ronde.spark.run(reduced, (1,), num_proc=2), 1)
