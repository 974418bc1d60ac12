"""In-place replay in jobs of real workers and sidecars, of which some are killed."""

from __future__ import annotations

import pytest
from conftest import PACKAGE

pytest.importorskip("torch")

from elastic_job import ElasticJob

WORKER = str(PACKAGE.parent / "tests" / "workers" / "replay.py")
THREE = ["-np", "3", "--min-np", "2", "--max-np", "3"]
TWO_HOSTS = ["-np", "3", "--min-np", "1", "-H", "127.0.0.1:2,127.0.0.2:1"]


def survived(job: ElasticJob, pattern: str) -> None:
    """Waits until both workers that are left have printed a line, without an exception."""
    job.await_text(pattern, 2)
    assert "Traceback" not in job.output, job.output
    assert "restoring the last commit" not in job.output, job.output


@pytest.mark.parametrize("victim", [0, 1])
def test_operations_in_flight_complete_over_the_workers_that_remain(victim: int) -> None:
    with ElasticJob(THREE, [WORKER, "operations", str(victim)]) as job:
        survived(job, r"worker \d: all operations over \[")


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("mode", ["grouped", "single"])
def test_a_training_that_loses_a_worker_amid_a_step_continues_with_it(mode: str, victim: int) -> None:
    with ElasticJob(THREE, [WORKER, mode, str(victim)]) as job:
        survived(job, r"worker \d: trained over \[")


def test_a_worker_that_remains_alone_continues() -> None:
    with ElasticJob(["-np", "2", "--min-np", "1", "--max-np", "2"], [WORKER, "single", "0", "2"]) as job:
        job.await_text(r"worker 1: trained over \[1\]")
    assert "Traceback" not in job.output, job.output


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("gather", "rank 1 on host localhost was killed by signal 9"),
        ("sets", "rank 1 on host (?:.|\\n)*could not continue: rank 0 cannot continue, because it has process sets"),
    ],
)
def test_operations_that_cannot_be_replayed_raise(kind: str, why: str) -> None:
    with ElasticJob(THREE, [WORKER, kind, "1"]) as job:
        job.await_text(rf"worker 0: {kind}: {why}")
        job.await_text(rf"worker 2: {kind}: {why}")
    assert "Traceback" not in job.output, job.output


def digits(monkeypatch: pytest.MonkeyPatch, options: list[str]) -> ElasticJob:
    monkeypatch.setenv("RONDE_ON_FAILURE", "continue")
    return ElasticJob(options)


def test_a_lost_rank_0_costs_no_step_and_a_new_worker_takes_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    with digits(monkeypatch, ["-np", "3", "--min-np", "1"]) as job:
        killed = job.await_size(3, 0)
        job.await_text("epoch 1 ")
        job.kill(killed.pid)
        job.await_text(r"worker \d+ \(pid \d+\) continues as rank 0 of 2")
        job.await_size(3)
        reports = job.finish()
    assert len(reports) == 3
    assert "restoring the last commit" not in job.output


def test_a_lost_host_costs_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    with digits(monkeypatch, TWO_HOSTS) as job:
        worker = job.await_size(3, 2)
        job.await_text("epoch 1 ")
        job.kill(job.sidecar_of(worker))
        job.await_text(r"continues as rank 1 of 2")
        job.finish()
    assert "restoring the last commit" not in job.output
