"""`ronde.spark.run` over Spark Connect: the client has no Java, and sees only how far the server is."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
from test_run import check_gone, check_reduced, reduced, wait_until

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def connected(home: pathlib.Path) -> Iterator[Any]:
    """A client of a server with two places."""
    from pyspark.sql import SparkSession

    started = SparkSession.builder.remote("local[2]").getOrCreate()
    yield started
    started.stop()


def test_each_rank_returns_its_result(connected: Any) -> None:
    import ronde.spark

    check_reduced(ronde.spark.run(reduced, args=(1,), num_proc=2), 1)


def test_a_rank_that_raises_is_named(connected: Any) -> None:
    import ronde.spark

    def train() -> None:
        if os.environ["RONDE_RANK"] == "1":
            raise LookupError("no such digit")

    with pytest.raises(ronde.spark.WorkerError, match=r"(?s)^rank 1 of 2 on .*LookupError: no such digit$") as caught:
        ronde.spark.run(train, num_proc=2)
    assert caught.value.rank == 1


def test_more_processes_than_slots_end_with_the_count(connected: Any) -> None:
    import ronde.spark

    with pytest.raises(TimeoutError, match=r"5 processes are wanted at once, and none has started"):
        ronde.spark.run(reduced, (1,), num_proc=5, start_timeout=5)


def test_an_interrupt_ends_the_ranks(connected: Any, tmp_path: pathlib.Path) -> None:
    import ronde.spark

    folder = str(tmp_path)

    def wait() -> None:
        import pathlib
        import time

        pathlib.Path(folder, os.environ["RONDE_RANK"]).write_text(str(os.getpid()))
        time.sleep(600)

    def interrupt() -> None:
        wait_until(lambda: len([path for path in tmp_path.iterdir() if path.read_text()]) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ronde.spark.run(wait, num_proc=2)
    thread.join()
    check_gone([int(path.read_text()) for path in tmp_path.iterdir()])


def test_elastic_jobs_are_refused(connected: Any) -> None:
    import ronde.spark

    with pytest.raises(ValueError, match="run_elastic needs a session whose driver is this program"):
        ronde.spark.run_elastic(reduced, (1,), num_proc=2)
