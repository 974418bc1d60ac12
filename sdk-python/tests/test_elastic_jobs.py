"""Elastic jobs of real workers and sidecars, which are killed, added and removed.

`examples/elastic_digits.py` trains, until the test has seen what it waits for.
"""

from __future__ import annotations

import ast
import os
import pathlib
import signal
import subprocess
import sys
from typing import Any

import pytest
from conftest import PACKAGE, ronde_binary

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytest.importorskip("cloudpickle")

from elastic_job import COMPAT, PATIENCE_S, ElasticJob, Hosts

ONE_HOST = ["-np", "3", "--min-np", "1"]
TWO_HOSTS = ["-np", "3", "--min-np", "1", "-H", "127.0.0.1:2,127.0.0.2:1"]


def test_a_job_without_faults_trains_as_a_fixed_one() -> None:
    with ElasticJob(["-np", "2", "--min-np", "2"]) as job:
        reports = job.finish()
    assert len(reports) == 2
    assert [each.how for each in job.seen()] == ["begins"] * 2


@pytest.mark.parametrize("rank", [2, 0])
def test_a_killed_worker_is_replaced(rank: int) -> None:
    """Also that of rank 0, whose state the others have."""
    with ElasticJob(ONE_HOST) as job:
        killed = job.await_size(3, rank)
        job.await_text("epoch 1 ")
        job.kill(killed.pid)
        job.await_text(rf"worker (?!{killed.worker} )\d+ \(pid \d+\) continues as rank 0 of 2")
        job.await_size(3)
        reports = job.finish()
    newcomers = [each for each in job.seen() if each.how == "begins" and each.worker > 2]
    assert [each.size for each in newcomers] == [3]
    # Those who were there before come first.
    assert newcomers[0].rank == 2
    assert len(reports) == 3
    assert "SIGKILL" in job.output


def test_a_killed_sidecar_takes_its_workers_with_it() -> None:
    with ElasticJob(TWO_HOSTS) as job:
        worker = job.await_size(3, 2)
        job.await_text("epoch 1 ")
        job.kill(job.sidecar_of(worker))
        job.await_text(r"continues as rank 1 of")
        job.finish()
    assert worker.worker not in [each.worker for each in job.seen() if each.how == "continues"]


def test_the_sidecar_of_rank_0_is_killed() -> None:
    with ElasticJob(["-np", "3", "--min-np", "1", "-H", "127.0.0.1:1,127.0.0.2:2"]) as job:
        worker = job.await_size(3, 0)
        job.await_text("epoch 1 ")
        job.kill(job.sidecar_of(worker))
        survivors = job.await_text(r"worker (\d+) \(pid \d+\) continues as rank 0 of")
        job.finish()
    assert int(survivors[0][1]) != worker.worker


def test_a_worker_that_gets_sigterm_leaves_at_its_next_commit() -> None:
    """And nothing is lost: nobody restores a commit."""
    with ElasticJob([*TWO_HOSTS, "--preemption-notice", "100"]) as job:
        worker = job.await_size(3, 2)
        job.await_text("epoch 1 ")
        os.kill(worker.pid, signal.SIGTERM)
        job.await_text(rf"worker {worker.worker} on host 127.0.0.2 got SIGTERM")
        job.await_text("2 ranks on 1 host, because a host got SIGTERM")
        job.await_size(2)
        reports = job.finish()
    assert len(reports) == 2
    assert "restoring the last commit" not in job.output
    assert "was lost" not in job.output


@pytest.fixture
def hosts(tmp_path: pathlib.Path) -> Hosts:
    return Hosts(tmp_path)


def test_hosts_are_added_and_removed(hosts: Hosts) -> None:
    """Nothing is restored: all ranks leave the function together, at a commit or check."""
    hosts.set("127.0.0.1:1")
    with ElasticJob(["-np", "1", "--min-np", "1", "--host-discovery-script", str(hosts.script)]) as job:
        job.await_text("epoch 1 ")
        hosts.set("127.0.0.2:1", "127.0.0.1:1")
        newcomer = job.await_size(2, 1)
        assert newcomer.how == "begins"
        job.await_text(r"epoch 2 ")
        hosts.set("127.0.0.1:1")
        job.await_text(r"continues as rank 0 of 1\b")
        reports = job.finish()
    assert [(each.rank, each.size) for each in reports] == [(0, 1)]
    assert "restoring the last commit" not in job.output
    assert "RONDE-E" not in job.output


def test_too_few_slots_end_the_job_with_both_numbers(hosts: Hosts) -> None:
    hosts.set("127.0.0.1:1")
    options = ["-np", "2", "--min-np", "2", "--host-discovery-script", str(hosts.script), "--elastic-timeout", "3"]
    with ElasticJob(options) as job:
        assert job.status() != 0
    assert "needs 2 slots, and there are 1 after waiting 3 s (--elastic-timeout)" in job.output, job.output
    assert job.seen() == []


FUNCTION = """
import os, signal, sys
import horovod

def train(steps):
    import torch, horovod.torch as hvd
    hvd.init()
    state = hvd.elastic.TorchState(step=0)

    @hvd.elastic.run
    def loop(state):
        while state.step < steps:
            hvd.allreduce(torch.ones(1), name="step")
            state.step += 1
            state.commit()
            if state.step == 10 and os.environ["RONDE_WORKER"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)

    loop(state)
    return hvd.rank(), hvd.size(), state.step

if __name__ == "__main__":
    print("results", horovod.run(train, (30,), num_proc=2, min_num_proc=1), flush=True)
"""


def test_a_function_returns_the_results_at_the_end(tmp_path: pathlib.Path) -> None:
    program = tmp_path / "function.py"
    program.write_text(FUNCTION)
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": f"{PACKAGE}{os.pathsep}{COMPAT}"}
    environment["PATH"] = f"{pathlib.Path(ronde_binary()).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=PATIENCE_S, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = ast.literal_eval(done.stdout.partition("results ")[2])
    assert [rank for rank, _, _ in results] == list(range(len(results)))
    assert {(size, step) for _, size, step in results} == {(len(results), 30)}
