"""`ronde.spark.run` on real sessions: what functions return, and what happens when something fails."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import re
import signal
import subprocess
import threading
import time
from typing import Any

import numpy
import pytest

# Of what ends within seconds: the test fails where it takes this long.
WAIT_MAX_S = 400


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + WAIT_MAX_S
    while not condition():
        assert time.monotonic() < deadline, "it has not happened in time"
        time.sleep(0.1)


def reduced(scale: int) -> dict[str, Any]:
    """A collective of each kind of input that may go wrong: ragged, empty, strided."""
    import ronde.torch as hvd
    import torch

    hvd.init()
    rank = hvd.rank()
    found = {
        "rank": rank,
        "size": hvd.size(),
        "local": (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()),
        "sum": hvd.allreduce(torch.arange(12.0).reshape(3, 4).t() * (rank + scale), op=hvd.Sum).tolist(),
        "gathered": hvd.allgather(torch.full((rank, 2), float(rank))).tolist(),
        "empty": tuple(hvd.allreduce(torch.zeros(0), op=hvd.Sum).shape),
        "pid": os.getpid(),
    }
    hvd.shutdown()
    return found


def check_reduced(found: list[dict[str, Any]], scale: int) -> None:
    size = len(found)
    assert [each["rank"] for each in found] == list(range(size))
    total = sum(rank + scale for rank in range(size))
    for each in found:
        assert each["size"] == size
        assert numpy.array_equal(each["sum"], numpy.arange(12.0).reshape(3, 4).T * total)
        assert each["gathered"] == [[float(rank)] * 2 for rank in range(size) for _ in range(rank)]
        assert each["empty"] == (0,)


def check_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(pathlib.Path("/proc", str(pid)).exists() for pid in pids))


def test_each_rank_returns_its_result(spark: Any) -> None:
    import ronde.spark

    found = ronde.spark.run(reduced, args=(1,), num_proc=2)
    check_reduced(found, 1)
    assert [each["local"] for each in found] == [(0, 2, 0, 1), (1, 2, 0, 1)]
    check_gone([each["pid"] for each in found])
    # The default number of processes is that of the session's processors.
    check_reduced(ronde.spark.run(reduced, kwargs={"scale": 5}), 5)


def test_output_and_variables_of_ranks(spark: Any) -> None:
    import ronde.spark

    def speak() -> tuple[str, str, bytes, list[str]]:
        import sys

        from ronde.spark.task import get_available_devices

        print(f"rank {os.environ['RONDE_RANK']} speaks", flush=True)
        print("and warns", file=sys.stderr, flush=True)
        return os.environ["FLAVOUR"], os.environ["HOROVOD_LOCAL_RANK"], sys.stdin.buffer.read(), get_available_devices()

    out, err = io.StringIO(), io.StringIO()
    found = ronde.spark.run(
        speak, num_proc=2, env={"FLAVOUR": "lemon"}, stdout=out, stderr=err, prefix_output_with_timestamp=True
    )
    assert found == [("lemon", "0", b"", []), ("lemon", "1", b"", [])]
    lines = out.getvalue().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [f"[{rank}]<stdout>:rank {rank} speaks" for rank in range(2)]
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d ", line) for line in lines)
    assert err.getvalue().count("]<stderr>:and warns") == 2
    # As in a notebook.
    cell = io.StringIO()
    with contextlib.redirect_stdout(cell):
        ronde.spark.run(lambda: print("x"), num_proc=1)
    assert cell.getvalue() == "[0]<stdout>:x\n"


def test_arguments_that_cannot_act_are_refused(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import ronde.spark

    with pytest.raises(ValueError, match="Spark's tasks start the ranks, without mpirun"):
        ronde.spark.run(reduced, (1,), num_proc=2, use_mpi=True)
    with pytest.raises(ValueError, match="without mpirun"):
        ronde.spark.run(reduced, (1,), num_proc=2, extra_mpi_args="--bind-to none")
    with pytest.raises(ValueError, match="num_proc is 0; it is at least 1"):
        ronde.spark.run(reduced, (1,), num_proc=0)
    with pytest.raises(ValueError, match="are both given"):
        ronde.spark.run(reduced, (1,), num_proc=2, certs="/etc/certs", job_secret_file="/etc/secret")
    monkeypatch.setenv("HOROVOD_SPARK_START_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="HOROVOD_SPARK_START_TIMEOUT is 'soon'; give a number of seconds above 0"):
        ronde.spark.run(reduced, (1,), num_proc=2)


def test_what_cannot_be_pickled_is_named_before_a_task_begins(spark: Any) -> None:
    import ronde.spark

    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot pickle .*lock"):
        ronde.spark.run(lambda: print(lock), num_proc=2)
    with pytest.raises(TypeError, match=r"cannot pickle .*lock"):
        ronde.spark.run(reduced, args=(lock,), num_proc=2)


def test_more_processes_than_slots_wait_and_end_with_the_count(spark: Any, caplog: pytest.LogCaptureFixture) -> None:
    import ronde.spark

    wanted = r"5 processes are wanted at once, and the cluster has 2 slots"
    with pytest.raises(TimeoutError, match=rf"within 4 s \(start_timeout\): {wanted}"):
        ronde.spark.run(reduced, (1,), num_proc=5, start_timeout=4)
    assert "waiting for Spark, for up to" in caplog.text
    assert re.search(wanted, caplog.text)


def test_slots_that_others_have_are_waited_for(spark: Any, tmp_path: pathlib.Path) -> None:
    import ronde.spark

    stop, begun = tmp_path / "stop", tmp_path / "begun"

    def occupy(_: Any) -> Any:
        begun.touch()
        while not stop.exists():
            time.sleep(0.1)
        return iter([1])

    other = threading.Thread(target=lambda: spark.sparkContext.parallelize([1], 1).mapPartitions(occupy).count())
    other.start()
    try:
        wait_until(begun.exists)
        with pytest.raises(
            TimeoutError, match="the cluster has not given its 2 slots to them, which other tasks may have"
        ):
            ronde.spark.run(reduced, (1,), num_proc=2, start_timeout=5)
    finally:
        stop.touch()
        other.join(WAIT_MAX_S)
    check_reduced(ronde.spark.run(reduced, (1,), num_proc=2), 1)


def test_an_interrupt_ends_the_job_and_its_processes(spark: Any, tmp_path: pathlib.Path) -> None:
    import ronde.spark

    folder = str(tmp_path)

    def wait() -> None:
        import ronde.torch as hvd

        hvd.init()
        sidecar = int(subprocess.check_output(["pgrep", "-f", os.environ["RONDE_SOCKET"] + "|--job spark-"]).split()[0])
        pathlib.Path(folder, os.environ["RONDE_RANK"]).write_text(f"{os.getpid()} {os.getppid()} {sidecar}")
        time.sleep(600)

    def interrupt() -> None:
        wait_until(lambda: len([path for path in tmp_path.iterdir() if path.read_text()]) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Thread(target=interrupt)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        ronde.spark.run(wait, num_proc=2)
    timer.join(WAIT_MAX_S)
    check_gone([int(pid) for path in tmp_path.iterdir() for pid in path.read_text().split()])
    check_reduced(ronde.spark.run(reduced, (1,), num_proc=2), 1)


def test_without_a_session_horovods_words(home: pathlib.Path) -> None:
    import ronde.spark.session
    from pyspark import SparkContext

    kept, SparkContext._active_spark_context = SparkContext._active_spark_context, None
    try:
        with pytest.raises(RuntimeError, match="Could not find an active SparkContext"):
            ronde.spark.run(reduced, (1,), num_proc=2)
    finally:
        SparkContext._active_spark_context = kept
