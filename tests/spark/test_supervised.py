"""The process of a rank, its variables, and the end of a run that is interrupted. Without Spark."""

from __future__ import annotations

import io
import os
import sys
import threading
import time
import types
from typing import Any

import pytest
from ronde.cluster import supervised
from ronde.cluster.supervised import SupervisedRank
from ronde.run import Call, pickled
from ronde.spark import runner, running, supervisor
from ronde.spark.plan import RunPlan
from ronde.spark.session import ClassicSession, Progress, Session, Stage


def leaves_a_thread(fails: bool) -> int:
    threading.Thread(target=lambda: time.sleep(3600)).start()
    return 7 // (not fails)


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_does_not_exit_after_its_function_is_killed_and_named(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fails: bool
) -> None:
    monkeypatch.setattr(supervised, "_EXIT_TIMEOUT_S", 0.5)
    given = pickled(Call(leaves_a_thread, (fails,), {}))
    rank = SupervisedRank(sys.executable, given, {**os.environ, "RONDE_RANK": "3"}, lambda name, line: None)
    try:
        outcome = rank.wait()
    finally:
        rank.end()
    if fails:
        assert outcome.failure is not None
        assert "ZeroDivisionError" in outcome.failure.text
    else:
        assert outcome.result is not None
    message = f"the function of rank 3 has ended, but its process {rank.pid} has not exited"
    assert message in capfd.readouterr().err


class Late(Session):
    """A session whose job is active only some time after its start, and ends when it is cancelled then."""

    ACTIVE_AFTER_S = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.began = 0.0
        self.cancels: list[bool] = []
        self.done: Any = None

    def slots(self) -> int | None:
        return None

    def start(self, job: str, description: str, stage: Stage, done: Any) -> None:
        self.began, self.done = time.monotonic(), done

    def progress(self, job: str) -> Progress | None:
        raise KeyboardInterrupt

    def _cancel(self, job: str) -> None:
        is_active = time.monotonic() - self.began > self.ACTIVE_AFTER_S
        self.cancels.append(is_active)
        if is_active:
            self.done(None, RuntimeError("cancelled"))


def test_a_job_that_spark_gets_after_an_interrupt_is_cancelled() -> None:
    session = Late()
    with pytest.raises(KeyboardInterrupt):
        running.rows_of(session, RunPlan("late", b"", 2, 60.0, {}), "train", 0)
    assert len(session.cancels) > 1
    assert session.cancels == [False] * (len(session.cancels) - 1) + [True]


def test_a_cancelled_job_is_not_submitted() -> None:
    session: Any = object.__new__(ClassicSession)
    Session.__init__(session)
    session._context = types.SimpleNamespace(cancelJobGroup=lambda job: None)
    found: list[Any] = []
    stage = Stage(lambda batches: batches, 1, "rank int", is_barrier=True)
    session.cancel("job")
    # A session without methods: the stage does not get to it.
    session._collect(object(), "job", stage, lambda rows, error: found.append(error), lambda: None)
    assert "was cancelled before its stage was submitted" in str(found[0])


def test_a_job_whose_thread_cannot_be_started_ends_without_a_cancellation() -> None:
    class Full(Late):
        def start(self, job: str, description: str, stage: Stage, done: Any) -> None:
            raise RuntimeError("can't start new thread")

    session = Full()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        running.rows_of(session, RunPlan("full", b"", 2, 60.0, {}), "train", 0)
    assert session.cancels == []


def test_a_job_that_cannot_be_named_in_spark_has_failed() -> None:
    def stopped(*args: Any, **kwargs: Any) -> None:
        raise ValueError("the context was stopped")

    session: Any = object.__new__(ClassicSession)
    Session.__init__(session)
    session._session, session._context = object(), types.SimpleNamespace(setJobGroup=stopped)
    found: list[Any] = []
    ended = threading.Event()
    stage = Stage(lambda batches: batches, 1, "rank int", is_barrier=True)
    session.start("job", "train", stage, lambda rows, error: (found.append(error), ended.set()))
    assert ended.wait(60)
    assert "the context was stopped" in str(found[0])


def test_a_path_of_the_program_is_searched_before_that_of_the_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    monkeypatch.setenv("PYSPARK_GATEWAY_SECRET", "hunter2")
    monkeypatch.setattr(sys, "path", ["", "/added/by/spark"])
    plan = RunPlan("run", b"", 1, 60.0, {"PYTHONPATH": "/of/the/program", "FLAVOUR": "lemon"})
    place = types.SimpleNamespace(gpus=("3",))
    begun: Any = types.SimpleNamespace(
        rank=0, layout=types.SimpleNamespace(places=[place]), variables={"RONDE_RANK": "0"}
    )
    found = supervisor._variables(plan, begun)
    path = found["PYTHONPATH"].split(os.pathsep)
    assert (path[0], path[-2:]) == ("/of/the/program", ["/inherited", "/added/by/spark"])
    assert (found["FLAVOUR"], found["RONDE_RANK"], found[supervisor.GPUS]) == ("lemon", "0", "3")
    assert "PYSPARK_GATEWAY_SECRET" not in found


def test_the_closure_of_a_run_has_no_secret_of_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[RunPlan] = []

    def rows(session: Any, plan: RunPlan, name: str, verbose: int) -> dict[tuple[int, str], bytes]:
        plans.append(plan)
        raise InterruptedError

    session = types.SimpleNamespace(conf=lambda name, default="": default, release=lambda: "4.0.0")
    monkeypatch.setattr(runner.sessions, "active", lambda: session)
    monkeypatch.setattr(runner, "rows_of", rows)
    env = {"PYSPARK_GATEWAY_SECRET": "hunter2", "PYSPARK_GATEWAY_PORT": "1", "_SPARK_AUTH": "hunter2", "X": "1"}
    with pytest.raises(InterruptedError):
        runner.run(leaves_a_thread, (False,), num_proc=1, env=env)
    assert plans[0].variables == {"X": "1"}


def test_output_goes_to_streams_that_replace_those_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    assert runner._streams(None, None, "local[2]") == {}
    assert runner._streams(None, None, "local-cluster[2,1,1024]") == {"stdout": sys.stdout, "stderr": sys.stderr}
    cell = io.StringIO()
    monkeypatch.setattr(sys, "stdout", cell)
    assert runner._streams(None, None, "local[2]") == {"stdout": cell}
    assert runner._streams(cell, cell, "local[2]") == {"stdout": cell, "stderr": cell}
