"""A job of four hosts, when one of them or the network between them fails.

Each fault is made while all workers compute. Either the job goes on and every result is right, or each worker that is
left gets an error which names the culprit. How long that took is written into a file, of which table.py makes the table
in docs/OPERATIONS.md, and has a bound here: more than what is promised, as a loaded machine measures other things, too.
"""

from __future__ import annotations

import json
import pathlib
import re
import statistics
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest
from conftest import leave_out
from project import PATIENCE_S, SIDECARS, WORKERS, Project, is_local, moment
from slow_line import worsened
from table import Row, write

HERE = pathlib.Path(__file__).resolve().parent
CULPRIT = 2
# After a fault of some seconds the job must continue for this many steps.
STEPS_AFTER = 20
# How long a test waits for an error, however late that is.
ERROR_S = 60
# The limits of its delay: 2 s after a process was killed, and the peer timeout after silence.
KILLED_S = 4.0
SILENCE_S = 5.0 + 3.0
MakeProject = Callable[..., Project]
ROWS: list[Row] = []


@pytest.fixture(scope="module", autouse=True)
def measured() -> Iterator[None]:
    """Writes the measurements into the document, if all tests ran."""
    ROWS.clear()
    yield
    write(ROWS)


@pytest.fixture
def job(project: MakeProject) -> Project:
    """Four workers in the middle of their steps."""
    if not is_local():
        leave_out("docker", "faults in the network of containers need root on the engine's machine")
    one = project(HERE / "workers.yaml", RONDE_TEST_FOLDER=str(HERE))
    one.start(*WORKERS)
    for worker in WORKERS:
        one.await_lines(worker, r"^step 10 ")
    return one


def test_a_worker_is_killed(job: Project) -> None:
    """All others are notified at once."""
    killed = time.time()
    job.engine.run("kill", "--signal", "KILL", job.container(f"worker-{CULPRIT}"))
    errors = await_errors(job, [worker for worker in WORKERS if worker != f"worker-{CULPRIT}"], rf"rank {CULPRIT}\b")
    assert all(job.await_exit(sidecar) == 69 for sidecar in SIDECARS), "sidecars end with their workers"
    note("a worker is killed", "each other worker's error names its rank", killed, errors, KILLED_S)


def test_a_sidecar_is_killed(job: Project) -> None:
    """Its worker and all others are notified at once."""
    killed = time.time()
    job.engine.run("kill", "--signal", "KILL", job.container(f"sidecar-{CULPRIT}"))
    others = [worker for worker in WORKERS if worker != f"worker-{CULPRIT}"]
    errors = await_errors(job, others, rf"sidecar {CULPRIT}\b")
    lonely = await_errors(job, [f"worker-{CULPRIT}"], "sidecar")
    assert_nothing_runs(job, but=[f"sidecar-{CULPRIT}"])
    assert_within(killed, lonely, KILLED_S)
    note("a sidecar is killed", "each other worker's error names it", killed, errors, KILLED_S)


def test_a_sidecar_is_paused_for_ten_seconds(job: Project) -> None:
    """Longer than the peer timeout: the job ends, and the paused one learns that when it continues."""
    paused = time.time()
    job.engine.run("pause", job.container(f"sidecar-{CULPRIT}"))
    others = [worker for worker in WORKERS if worker != f"worker-{CULPRIT}"]
    suspected = await_suspicion(job, "sidecar-0", paused)
    errors = await_errors(job, others, rf"sidecar {CULPRIT}\b")
    time.sleep(max(0.0, paused + 10 - time.time()))
    job.engine.run("unpause", job.container(f"sidecar-{CULPRIT}"))
    await_errors(job, [f"worker-{CULPRIT}"], "sidecar")
    assert_nothing_runs(job)
    note("a sidecar is stopped for 10 s", "each other worker's error names it", paused, errors, SILENCE_S, suspected)


def test_a_link_is_cut_for_three_seconds(job: Project) -> None:
    """Shorter than the peer timeout: the job waits and goes on."""
    before = steps_of(job, "worker-0")
    cut_at = time.time()
    cut(job, f"sidecar-{CULPRIT}")
    suspected = await_suspicion(job, "sidecar-0", cut_at)
    time.sleep(max(0.0, cut_at + 3 - time.time()))
    mend(job, f"sidecar-{CULPRIT}")
    mended = time.time()
    held = steps_of(job, "worker-0")
    job.wait(lambda: steps_of(job, "worker-0") > held, "the first step after the cut")
    resumed = time.time() - mended
    await_steps(job, before + STEPS_AFTER)
    effect = "the job continues with right results"
    ROWS.append(Row("a host's network is cut for 3 s", effect, suspected, None, resumed))


def test_a_link_is_cut_for_ever(job: Project) -> None:
    """No side receives a shutdown: both sides of the cut detect silence."""
    cut_at = time.time()
    cut(job, f"sidecar-{CULPRIT}")
    suspected = await_suspicion(job, "sidecar-0", cut_at)
    others = [worker for worker in WORKERS if worker != f"worker-{CULPRIT}"]
    errors = await_errors(job, others, rf"sidecar {CULPRIT}\b")
    lonely = await_errors(job, [f"worker-{CULPRIT}"], r"sidecar \d")
    assert_nothing_runs(job)
    fault = "a host's network is cut for good"
    note(fault, "each other worker's error names it", cut_at, errors + lonely, SILENCE_S, suspected)


def test_one_percent_of_loss_and_twenty_milliseconds(job: Project) -> None:
    """A bad network is slow, and that is all."""
    before = step_seconds(job, "worker-0")
    with worsened(job, f"sidecar-{CULPRIT}", delay_s=0.01, loss=0.01) as line:
        began = steps_of(job, "worker-0")
        await_steps(job, began + STEPS_AFTER, 2 * PATIENCE_S)
        after = step_seconds(job, "worker-0")[began:]
        assert line.lost > 0
    usual, median = statistics.median(before), statistics.median(after)
    slower = f"a step of 1 MB takes {median:.2f} s instead of {usual:.2f} s"
    fault = "a host's network loses 1 % of packets each way, with a round-trip time of 20 ms"
    ROWS.append(Row(fault, f"the job continues with right results; {slower}", None, None, None))


# === Observations ===


def await_errors(job: Project, workers: list[str], culprit: str) -> list[float]:
    """Waits until each worker has its error, which names the culprit; returns the times."""
    moments = []
    for worker in workers:
        line = job.await_lines(worker, '^{"failed"', ERROR_S)[0]
        report = json.loads(line)
        assert re.search(culprit, report["error"]), f"{worker} does not name {culprit}: {report['error']}"
        assert job.await_exit(worker) == 1
        moments.append(report["failed"])
    return moments


def await_suspicion(job: Project, sidecar: str, since: float) -> float:
    """Waits until a sidecar reports that another is silent; returns the seconds since a time."""
    # A command in a container would take too long to start.
    url = f"http://{job.address(sidecar, 'metrics')}:9400/status"

    def named() -> bool:
        with urllib.request.urlopen(url, timeout=10) as page:
            return CULPRIT in json.load(page)["suspect_sidecars"]

    job.wait(named, f"the suspicion of {sidecar}", 30)
    return time.time() - since


def assert_within(at: float, errors: list[float], within_s: float) -> None:
    """Asserts that no error arrived later after a time than it may."""
    late = max(errors) - at
    assert late <= within_s, f"the last error came {late:.2f} s after the fault, later than {within_s:.0f} s"


def note(
    fault: str, outcome: str, at: float, errors: list[float], within_s: float, suspected: float | None = None
) -> None:
    """Stores a measurement that is within its limits."""
    assert_within(at, errors, within_s)
    ROWS.append(Row(fault, outcome, suspected, sorted(moment - at for moment in errors), None))


def steps_of(job: Project, worker: str) -> int:
    """How many steps a worker has done."""
    return len(step_seconds(job, worker))


def step_seconds(job: Project, worker: str) -> list[float]:
    """How long each step of a worker took."""
    return [float(found[1]) for found in re.finditer(r"^step \d+ in ([\d.]+) s$", job.logs(worker), re.MULTILINE)]


def await_steps(job: Project, count: int, within_s: float = PATIENCE_S) -> None:
    """Waits until every worker has done this many steps; each checks its results, and ends when one is wrong."""
    for worker in WORKERS:
        job.wait(lambda worker=worker: steps_of(job, worker) >= count, f"step {count} of {worker}", within_s)
        assert job.inspect(worker)["State"]["Running"]


def assert_nothing_runs(job: Project, but: list[str] | None = None) -> None:
    """Every container has ended by itself."""
    for service in [*WORKERS, *SIDECARS]:
        status = job.await_exit(service)
        expected = 69 if service in SIDECARS else 1
        assert status == expected or service in (but or []), (
            f"{service} ended with {status}: {job.logs(service)[-500:]}"
        )
        state = job.inspect(service)["State"]
        assert moment(state["FinishedAt"]) > moment(state["StartedAt"])


def cut(job: Project, sidecar: str) -> None:
    """Drops all packets between a sidecar and the others."""
    job.within(sidecar, "sh", "-c", rules(job, sidecar, "-A"))


def mend(job: Project, sidecar: str) -> None:
    """Takes that back."""
    job.within(sidecar, "sh", "-c", rules(job, sidecar, "-D"))


def rules(job: Project, sidecar: str, change: str) -> str:
    """Commands that change the rules that drop packets. One shell runs both: a cut has a length that tests choose."""
    interface = job.interface(sidecar)
    return f"iptables {change} INPUT -i {interface} -j DROP && iptables {change} OUTPUT -o {interface} -j DROP"
