"""Runs a stage of Spark whose tasks are the ranks of a job, and waits for it."""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import TYPE_CHECKING, Any

from ronde.spark.failures import WorkerError, cannot_begin
from ronde.spark.plan import SCHEMA
from ronde.spark.session import Stage
from ronde.spark.supervisor import RankTask

if TYPE_CHECKING:
    from ronde.spark.plan import RunPlan
    from ronde.spark.session import Session

_log = logging.getLogger("ronde.spark")
_POLL_S = 0.2
# What is waited for is reported this often.
_REPORT_S = 10.0
# How long to wait for cancelled tasks. Spark kills their processes after 2 s.
_END_TIMEOUT_S = 10.0
# What follows the message of a task's exception in that of Spark.
_AFTER = re.compile(r"\n\s*(SQLSTATE: |at (org\.apache\.spark|scala|java)\.|JVM stacktrace:|Driver stacktrace:)")
_FAILED = re.compile(r"ronde\.spark\.failures\.WorkerError: ((?:rank (\d+) of \d+ on node (\S+) )?.*)", re.DOTALL)
_CANNOT_BEGIN = re.compile(r"ronde\.spark\.failures\.CannotBeginError: (\(\w+\) .*)", re.DOTALL)
_NO_MODULE = re.compile(r"ModuleNotFoundError: No module named '(ronde|pyarrow|cloudpickle|numpy)[.']")
_TASK = re.compile(r"barrier task \w*Task\(\d+, (\d+)\) finished unsuccessfully\.\s*(.*)", re.DOTALL)


def rows_of(session: Session, plan: RunPlan, name: str, verbose: int) -> dict[tuple[int, str], bytes]:
    """Runs the stage. Returns what its ranks leave, by rank and kind.

    name    -- of the function, for Spark's interface
    verbose -- 0 for no message while the stage waits for room

    Raises TimeoutError, RondeError and WorkerError as `run` describes.
    """
    deadline = time.monotonic() + plan.timeout
    wait = _Wait(session, plan, deadline, verbose)
    wait.for_slots()
    job = f"ronde-{plan.run_id}"
    ended = threading.Event()
    found: list[Any] = [None, None]

    def done(rows: Any, error: BaseException | None) -> None:
        found[:] = [rows, error]
        ended.set()

    stage = Stage(RankTask(plan), plan.size, SCHEMA, is_barrier=True)
    try:
        try:
            session.start(job, f"ronde.spark: {name} on {plan.size} ranks", stage, done)
        except Exception as error:  # nothing has begun that would have to be cancelled
            done(None, error)
        wait.for_end(job, ended)
    except BaseException:
        _cancel(session, job, ended)
        raise
    if found[1] is not None:
        raise failure(found[1], plan.size) from None
    return _by_rank(found[0])


def _cancel(session: Session, job: str, ended: threading.Event) -> None:
    """Cancels a job until it has ended: Spark does not cancel a stage that it gets only after the call."""
    deadline = time.monotonic() + _END_TIMEOUT_S
    session.cancel(job)
    while not ended.wait(_POLL_S) and time.monotonic() < deadline:
        session.cancel(job)


def _by_rank(rows: Any) -> dict[tuple[int, str], bytes]:
    parts: dict[tuple[int, str], list[bytes]] = {}
    for row in sorted(rows, key=lambda row: row.part):
        parts.setdefault((row.rank, row.kind), []).append(bytes(row.content))
    return {key: b"".join(contents) for key, contents in parts.items()}


class _Wait:
    """Waits until Spark has room for a stage and starts its tasks, until a deadline, and then for its end."""

    def __init__(self, session: Session, plan: RunPlan, deadline: float, verbose: int) -> None:
        self._session, self._plan, self._deadline = session, plan, deadline
        self._verbose = verbose
        self._reported_at = time.monotonic() - _REPORT_S + 2.0

    def for_slots(self) -> None:
        """Waits until the cluster has as many slots as ranks: before that, Spark would not take the stage."""
        while True:
            slots = self._session.slots()
            if slots is None or slots >= self._plan.size:
                return
            self._pause(f"the cluster has {slots} slots, in executors that have registered")

    def for_end(self, job: str, ended: threading.Event) -> None:
        """Waits until the tasks of a job have started, and then until they have ended."""
        self._reported_at = time.monotonic()
        while not ended.wait(_POLL_S):
            progress = self._session.progress(job)
            if progress is None or progress.active + progress.ended > 0:
                ended.wait()
                return
            slots = self._session.slots()
            all_slots = "its slots" if slots is None else f"its {slots} slots"
            self._pause(f"none has started: the cluster has not given {all_slots} to them, which other tasks may have")

    def _pause(self, state: str) -> None:
        rest = self._deadline - time.monotonic()
        wanted = f"{self._plan.size} processes are wanted at once, and {state}"
        if rest <= 0:
            raise TimeoutError(
                f"Spark has not started the processes within {self._plan.timeout:.0f} s (start_timeout): {wanted}. "
                "Start more executors, ask for fewer processes (num_proc), or lower spark.task.cpus"
            )
        if self._verbose and time.monotonic() - self._reported_at >= _REPORT_S:
            self._reported_at = time.monotonic()
            _log.warning("waiting for Spark, for up to %.0f s more: %s", rest, wanted)
        time.sleep(min(_POLL_S, rest))


def failure(error: BaseException, size: int) -> BaseException:
    """Returns the error for the caller, from that of Spark, which has the exception of the first task that failed."""
    text = str(error)
    if match := _FAILED.search(text):
        rank, host = match[2], match[3] or ""
        return WorkerError(_message(match[1]), None if rank is None else int(rank), host)
    if match := _CANNOT_BEGIN.search(text):
        return cannot_begin(_message(match[1]))
    if match := _NO_MODULE.search(text):
        return WorkerError(
            f"the Python of Spark's tasks has no module {match[1]}: install ronde with its requirements on all hosts "
            '(pip install "WHEEL[spark]", where WHEEL is the path of its wheel), and let PYSPARK_PYTHON name that '
            f"Python\n\n{_message(text)}"
        )
    if match := _TASK.search(text):
        return WorkerError(f"task {match[1]} of {size} was lost: {_message(match[2])}")
    return WorkerError(f"Spark has ended the job: {text}")


def _message(text: str) -> str:
    return _AFTER.split(text, 1)[0].strip()
