"""Flight records of real jobs: which ranks are missing from an operation, and which files a failure leaves."""

from __future__ import annotations

import json
import os
import pathlib
import re
import stat
import subprocess
import sys
import tempfile
import time
from typing import TYPE_CHECKING, Any, Callable

import pytest
from conftest import PACKAGE, WORKERS, ronde_binary

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = WORKERS / "flight.py"
TIMEOUT_S = 120
Start = Callable[..., "subprocess.Popen[str]"]


def line_of(marker: str) -> int:
    """Returns the number of the line of the script with this comment."""
    lines = enumerate(SCRIPT.read_text().splitlines(), 1)
    return next(number for number, line in lines if line.endswith(f"# {marker}"))


def not_submitted(rank: int) -> str:
    """Returns a pattern for the sentence about the missing rank, up to its last call's age."""
    last = line_of("the last call")
    return (
        rf'rank {rank} never submitted "layer4\.weight"; '
        rf'its last call was allreduce "layer3\.bias" at \S*flight\.py:{last}'
    )


@pytest.fixture(autouse=True)
def _places(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes jobs write below this test's directory, but sockets below one with a short name."""
    with tempfile.TemporaryDirectory(prefix="rf") as runtime:
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        monkeypatch.setenv("PYTHONPATH", str(PACKAGE))
        monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
        yield


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Start]:
    """Starts the script as a job of three ranks on two sidecars; ends it afterwards."""
    jobs: list[subprocess.Popen[str]] = []

    def started(mode: str, missing: int, *options: str, steps: int = 0, **variables: str) -> subprocess.Popen[str]:
        job = [ronde_binary(), "run", "-np", "3", "--sidecars", "2", "--start-timeout", "120", *options]
        command = [*job, sys.executable, str(SCRIPT), mode, str(missing), str(tmp_path / "marker"), str(steps)]
        environment = {**os.environ, **variables}
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        jobs.append(subprocess.Popen(command, env=environment, cwd=tmp_path, **pipes))
        return jobs[-1]

    yield started
    for job in jobs:
        if job.poll() is None:
            job.terminate()
        job.communicate(timeout=TIMEOUT_S)


def debug(directory: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `ronde debug` in a directory, where it finds the job's sidecars."""
    command = [ronde_binary(), "debug", *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def records(directory: pathlib.Path) -> list[pathlib.Path]:
    """The flight records below a directory."""
    return sorted(directory.rglob("*.flight.json"))


def await_wait(directory: pathlib.Path, ranks: str) -> str:
    """Dumps and analyses until these ranks wait in the last call, not in one of the steps before it."""
    return await_analysis(directory, rf"ranks {ranks} wait for it at \S*flight\.py:{line_of('the wait')},")


def await_analysis(directory: pathlib.Path, part: str) -> str:
    """Dumps and analyses until the analysis contains a pattern."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        dumped = debug(directory, "dump")
        text = debug(directory, "analyze", "ronde-flight").stdout if dumped.returncode == 0 else dumped.stderr
        if re.search(part, text):
            return text
        assert time.monotonic() < deadline, text
        time.sleep(0.2)


def test_a_dump_of_a_job_that_hangs_names_the_missing_rank(start: Start, tmp_path: pathlib.Path) -> None:
    job = start("hang", 1)
    text = await_wait(tmp_path, "0 and 2")
    assert re.search(rf"^{not_submitted(1)}, \d+\.\d m?s before the dump$", text, re.MULTILINE), text
    waiters = rf"^  ranks 0 and 2 wait for it at \S*flight\.py:{line_of('the wait')}, for \d+\.\d m?s$"
    assert re.search(waiters, text, re.MULTILINE), text
    assert re.search(r"^job \S+: records of sidecars 0 and 1; 3 ranks, epoch 1$", text, re.MULTILINE), text
    # Further dumps remove no file of earlier ones.
    earlier = records(tmp_path / "ronde-flight")
    for _ in range(8):
        assert debug(tmp_path, "dump").returncode == 0
    files = records(tmp_path / "ronde-flight")
    assert set(earlier) < set(files), files
    assert len(files) == len(earlier) + 2 * 8, files
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    (tmp_path / "marker").touch()
    out, err = job.communicate(timeout=TIMEOUT_S)
    assert (job.returncode, out.count("is done")) == (0, 3), f"{out}\n{err}"
    assert records(tmp_path / f"ronde.flight-{os.geteuid()}") == [], "a job that ends well writes nothing"


def test_a_killed_worker_leaves_records_that_the_failure_names(start: Start, tmp_path: pathlib.Path) -> None:
    job = start("kill", 2)
    out, err = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 137, f"{out}\n{err}"
    named = re.search(r"flight records: (\S+); read them with `ronde debug analyze (\S+)`", err)
    assert named, err
    directory = pathlib.Path(named[1])
    assert (named[2], directory.parent) == (named[1], tmp_path / f"ronde.flight-{os.geteuid()}")
    files = records(directory)
    assert len(files) == 2, files
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert {stat.S_IMODE(place.stat().st_mode) for place in (directory, directory.parent)} == {0o700}
    timeline = tmp_path / "timeline.json"
    analysed = debug(tmp_path, "analyze", str(directory), "--perfetto", str(timeline))
    assert analysed.returncode == 0, analysed.stderr
    assert re.search(rf"^{not_submitted(2)}, \S+ m?s before the failure$", analysed.stdout, re.MULTILINE), (
        analysed.stdout
    )
    assert "recorded after a failure: rank 2 on host localhost was killed by signal 9" in analysed.stdout
    assert any(event.get("name") == "NEGOTIATE_ALLREDUCE" for event in json.loads(timeline.read_text()))
    assert "allreduce.layer4.weight" in timeline.read_text()


def test_a_stall_that_ends_the_job_leaves_the_record_of_the_missing_rank(start: Start, tmp_path: pathlib.Path) -> None:
    limits = ("--stall-check-warning-time-seconds", "1", "--stall-check-shutdown-time-seconds", "2")
    job = start("stall", 2, *limits, RONDE_FLIGHT_DIR=str(tmp_path / "records"))
    deadline = time.monotonic() + TIMEOUT_S
    while len(records(tmp_path / "records")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    (tmp_path / "marker").touch()
    _, err = job.communicate(timeout=TIMEOUT_S)
    assert f"ronde debug analyze {tmp_path / 'records'}`" in err, err
    text = debug(tmp_path, "analyze", "records").stdout
    assert 'rank 2 never submitted "layer4.weight"' in text, text


def requests_of(record: pathlib.Path, name: str) -> list[dict[str, Any]]:
    """The requests of a name in a record, of all its ranks."""
    ranks = json.loads(record.read_text())["ranks"]
    return [request for rank in ranks for request in rank["requests"] if request["name"] == f"allreduce.{name}"]


def has_schedule(files: list[pathlib.Path]) -> bool:
    """Whether a schedule has admitted the newest request of a name that ranks wait for."""
    newest = [requests[-1] for requests in (requests_of(file, "layer4.weight") for file in files) if requests]
    return any(request.get("ordered", {}).get("scheduled", False) for request in newest)


def not_again(rank: int) -> str:
    """Returns a pattern for the sentence about the missing rank after equal steps, up to its last call's age."""
    last = line_of("the last of a step")
    return (
        rf'^rank {rank} has not submitted "layer4\.weight" again; '
        rf'its last call was allreduce "layer4\.bias" at \S*flight\.py:{last}, '
    )


def test_a_dump_under_a_schedule_names_the_missing_rank_of_another_sidecar(
    start: Start, tmp_path: pathlib.Path
) -> None:
    job = start("hang", 2, steps=10)
    text = await_wait(tmp_path, "0 and 1")
    assert has_schedule(records(tmp_path / "ronde-flight")), "the operations are not negotiated"
    assert re.search(not_again(2), text, re.MULTILINE), text
    assert "in progress" not in text, text
    (tmp_path / "marker").touch()
    out, err = job.communicate(timeout=TIMEOUT_S)
    assert (job.returncode, out.count("is done")) == (0, 3), f"{out}\n{err}"


def test_a_kill_under_a_schedule_names_the_missing_rank_of_another_sidecar(
    start: Start, tmp_path: pathlib.Path
) -> None:
    job = start("kill", 2, steps=10, RONDE_FLIGHT_DIR="records")
    _, err = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 137, err
    assert has_schedule(records(tmp_path / "records"))
    text = debug(tmp_path, "analyze", "records").stdout
    assert re.search(not_again(2), text, re.MULTILINE), text
    assert "  ranks 0 and 1 wait for it at " in text, text
    assert "in progress" not in text, text


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # The coordinator negotiates, and knows who has not announced it.
        (0, r'^rank 2 did not submit "layer4\.weight", for which others have waited \S+ m?s; sidecar 0 reports it, '),
        # Under a schedule it does not know.
        (10, r'^rank 2 may not have submitted "layer4\.weight": there is no record of it$'),
    ],
)
def test_a_killed_sidecar_leaves_the_record_of_the_other_one(
    start: Start, tmp_path: pathlib.Path, steps: int, expected: str
) -> None:
    job = start("kill-sidecar", 2, steps=steps, RONDE_FLIGHT_DIR="records")
    _, err = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode != 0, err
    assert [file.name.rsplit(".", 3)[0].rpartition(".")[2] for file in records(tmp_path / "records")] == ["sidecar-0"]
    text = debug(tmp_path, "analyze", "records").stdout
    # The launcher may end the other ranks before their sidecar has noticed it.
    reason = r"(sidecar 1 |rank [01] on host localhost was killed by signal 15)"
    assert re.search(rf"^sidecar 0 recorded after a failure: {reason}", text, re.MULTILINE), text
    assert "no record of sidecar 1, which serves rank 2: its ranks are not analyzed" in text, text
    assert re.search(expected, text, re.MULTILINE), text


def test_a_rank_that_leaves_while_others_wait_for_it_leaves_records(start: Start, tmp_path: pathlib.Path) -> None:
    job = start("leave", 2, RONDE_FLIGHT_DIR="records")
    job.communicate(timeout=TIMEOUT_S)
    assert len(records(tmp_path / "records")) >= 1
    text = debug(tmp_path, "analyze", "records").stdout
    assert "recorded after a failure: ronde has been shut down: rank 2" in text, text
    assert re.search(r"^rank 2 (never submitted|did not submit) ", text, re.MULTILINE), text


def test_an_operation_timeout_leaves_one_record_a_minute_and_a_dump_adds_the_others(
    start: Start, tmp_path: pathlib.Path
) -> None:
    job = start("timeout", 1, RONDE_OPERATION_TIMEOUT="2", RONDE_FLIGHT_DIR="records")
    deadline = time.monotonic() + TIMEOUT_S
    # Both ranks have timed out, or have failed with the other one, twice. A sidecar writes a record when one of its
    # ranks times out, and may be late.
    while len(list(tmp_path.glob("timed-out-*"))) < 2 or not records(tmp_path / "records"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    files = records(tmp_path / "records")
    sidecars = [file.name.rsplit(".", 3)[0] for file in files]
    assert 1 <= len(files) == len(set(sidecars)), files
    for file in files:
        assert "the operation timeout of this rank" in json.loads(file.read_text())["failure"]
    dumped = debug(tmp_path, "dump", "--output", "records")
    assert dumped.returncode == 0, dumped.stderr
    text = debug(tmp_path, "analyze", "records").stdout
    assert re.search(rf"^{not_submitted(1)}, \S+ m?s before the dump$", text, re.MULTILINE), text
    (tmp_path / "marker").touch()
    _, err = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 0, err


def test_nothing_is_recorded_when_it_is_off(start: Start, tmp_path: pathlib.Path) -> None:
    job = start("kill", 2, RONDE_FLIGHT_DIR="off")
    _, err = job.communicate(timeout=TIMEOUT_S)
    assert job.returncode == 137
    assert "flight" not in err.replace("flight.py", ""), err
    assert records(tmp_path) == []
    (tmp_path / "marker").unlink(missing_ok=True)
    job = start("hang", 1, "--flight-dir", "off")
    refused = await_refusal(tmp_path)
    assert "the flight recorder of this sidecar is off" in refused
    assert "[RONDE-E603]" in refused
    (tmp_path / "marker").touch()
    job.communicate(timeout=TIMEOUT_S)
    assert (job.returncode, records(tmp_path)) == (0, [])


def await_refusal(directory: pathlib.Path) -> str:
    """Dumps until a sidecar answers; returns its refusal."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        refused = debug(directory, "dump")
        assert refused.returncode == 69, refused.stdout
        if "recorder" in refused.stderr:
            return refused.stderr
        assert time.monotonic() < deadline, refused.stderr
        time.sleep(0.2)


def test_without_call_sites_the_rest_is_recorded(start: Start, tmp_path: pathlib.Path) -> None:
    job = start("hang", 1, RONDE_FLIGHT_CALL_SITES="0")
    # Not in one of the operations before, in which ranks wait for each other, too.
    text = await_analysis(tmp_path, r'never submitted "layer4\.weight".*\n  ranks 0 and 2 wait for it, ')
    expected = (
        r'rank 1 never submitted "layer4\.weight"; its last call was allreduce "layer3\.bias", \S+ m?s before the dump'
    )
    assert re.search(expected, text), text
    assert "flight.py" not in text
    (tmp_path / "marker").touch()
    job.communicate(timeout=TIMEOUT_S)
