"""Step times and shares of communication, and the logs that they go to."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy
import pytest

import ronde
from ronde import monitor
from ronde.monitor import StepMonitor, StepReport, TensorBoardLog, Usage, WandbLog


class Kept:
    """A log that keeps what is written."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, dict[str, float]]] = []

    def write(self, values: Any, step: int) -> None:
        self.lines.append((step, dict(values)))


class Fake:
    """A clock and counters that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.used = 100.0, Usage(0, 0, 0.0, 0.0)
        monkeypatch.setattr(monitor, "usage", lambda: self.used)

    def clock(self) -> float:
        return self.now

    def work(self, seconds: float, *used: float) -> None:
        self.now += seconds
        self.used = Usage(*(before + more for before, more in zip(self.used, (*used, 0, 0, 0, 0))))  # type: ignore[arg-type]


def test_a_report_has_the_means_since_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, log = Fake(monkeypatch), Kept()
    fake.work(5, 7, 7, 7, 7)  # before the monitor
    steps = StepMonitor(log, every=2, clock=fake.clock)
    fake.work(1.0, 3, 100, 0.5, 0.25)
    assert steps.step() is None
    fake.work(3.0, 1, 60, 0.5, 0.25)
    assert steps.step() == StepReport(2.0, 0.25, 0.125, 80, 2)
    fake.work(0.5, 2, 8, 0.5, 0.0)
    assert steps.step() is None
    assert steps.report() == StepReport(0.5, 1.0, 0.0, 8, 2)
    assert steps.report() is None, "there was no step"
    assert [step for step, _ in log.lines] == [2, 3]
    assert log.lines[0][1] == {
        "ronde/step_seconds": 2.0,
        "ronde/in_flight_share": 0.25,
        "ronde/waiting_share": 0.125,
        "ronde/bytes_per_step": 80,
        "ronde/operations_per_step": 2,
    }


def test_a_log_is_no_part_of_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch)

    class Slow:
        def write(self, values: Any, step: int) -> None:
            fake.work(50.0)

    steps = StepMonitor(Slow(), clock=fake.clock)
    fake.work(1.0)
    steps.step()
    fake.work(2.0)
    report = steps.step()
    assert report is not None
    assert report.step_seconds == 2.0


def test_a_pause_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, log = Fake(monkeypatch), Kept()
    steps = StepMonitor(log, every=2, clock=fake.clock)
    fake.work(1.0, 3, 100, 0.5, 0.25)
    assert steps.step() is None
    steps.pause()
    fake.work(20.0, 50, 5_000, 9.0, 9.0)
    steps.pause()
    fake.work(20.0, 50, 5_000, 9.0, 9.0)
    steps.resume()
    steps.resume()
    fake.work(3.0, 1, 60, 0.5, 0.25)
    assert steps.step() == StepReport(2.0, 0.25, 0.125, 80, 2)
    fake.work(1.0)
    steps.step()
    steps.pause()
    fake.work(70.0)
    assert steps.report() == StepReport(1.0, 0.0, 0.0, 0.0, 0.0), "a report ends the pause"


def test_no_time_and_no_steps_are_no_division(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch)
    assert StepMonitor(clock=fake.clock).step() == StepReport(0.0, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="every=0 is not a number of steps"):
        StepMonitor(every=0)


def test_a_writer_of_the_program_is_used_and_left_open() -> None:
    written = []

    class Writer:
        def add_scalar(self, *values: Any) -> None:
            written.append(values)

    log = TensorBoardLog(Writer())
    log.write({"a": 1.5}, 3)
    log.close()
    assert written == [("a", 1.5, 3)]
    with pytest.raises(TypeError, match="int is neither a folder nor a writer with the method add_scalar"):
        TensorBoardLog(3)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="pip install wandb"):
        WandbLog()
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install torch tensorboard; or pass a writer"):
        TensorBoardLog("runs")


def _measured(late: float) -> tuple[list[float], float, int]:
    """Steps in which rank 1 comes later than rank 0."""
    client = ronde.connect()
    tensor = numpy.ones(1000, dtype=numpy.float32)
    client.barrier()
    steps = StepMonitor(every=3)
    for _ in range(3):
        time.sleep(late if client.rank == 1 else 0)
        client.allreduce(tensor, name="gradient")
        report = steps.step()
    assert report is not None
    before = monitor.usage()
    child = os.fork()
    if child == 0:
        os._exit(0 if monitor.usage() == Usage(0, 0, 0.0, 0.0) else 1)
    forked = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    client.close()
    assert monitor.usage() == before, "nothing is in flight any more"
    return list(report), float(before.operations), forked


def test_the_rank_that_others_wait_for_waits_least() -> None:
    early, late = ronde.run(_measured, args=(0.4,), np=2)
    for report, operations, forked in (early, late):
        assert report[0] >= 0.4
        assert report[3:] == [4000.0, 1.0]
        assert operations >= 4
        assert forked == 0, "a forked process has no client"
    # The late rank comes 0.4 s after the other one, in each step, and finds the operation ready.
    assert early[0][1] > 0.5
    assert early[0][2] > 0.5
    assert early[0][1] - late[0][1] > 0.25, (early, late)
    assert early[0][2] - late[0][2] > 0.25, (early, late)


def _forked() -> tuple[int, int, float]:
    """The child of a process that has counted opens its own client."""
    assert monitor.usage() == Usage(0, 0, 0.0, 0.0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            client = ronde.connect()
            client.allreduce(numpy.ones(1000, dtype=numpy.float32), name="gradient")
            used = monitor.usage()
            client.close()
            os.write(writer, f"{used.operations} {used.bytes} {used.in_flight_seconds}".encode())
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    operations, size, seconds = os.read(reader, 1_000).decode().split()
    return int(operations), int(size), float(seconds)


def test_a_forked_process_counts_for_itself() -> None:
    ((operations, size, seconds),) = ronde.run(_forked, np=1)
    assert (operations, size) == (1, 4_000)
    assert seconds > 0
