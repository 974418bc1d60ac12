"""Horovod's variables and flags take effect under mpirun, alone and through `horovodrun --mpi`."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import pytest
from conftest import PACKAGE, WORKERS, leave_out, ronde_binary
from test_horovodrun import COMPAT, TIMEOUT_S
from test_horovodrun_mpi import on_hosts
from two_hosts import two_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("torch")
MPIRUN = pathlib.Path(sys.executable).with_name("mpirun")
SCRIPT = str(WORKERS / "settings_by_mpi.py")
PLAIN = [str(MPIRUN), "--allow-run-as-root", "--oversubscribe", "-np", "2"]
BY_HOROVODRUN = [sys.executable, "-m", "horovod.runner.launch", "-np", "2", "--mpi", "--mpi-args=--oversubscribe"]


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A temporary folder for the job, which must be empty at the end. Skips without mpirun."""
    if not MPIRUN.is_file():
        leave_out("mpi", "there is no mpirun beside this Python; `make setup` installs it")
    with tempfile.TemporaryDirectory(prefix="r-") as place:
        monkeypatch.setenv("TMPDIR", place)
        yield pathlib.Path(place)
        assert not list(pathlib.Path(place).glob("ronde-*"))


def started(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment: dict[str, Any] = {**os.environ, **variables, "RONDE_BIN": ronde_binary()}
    environment["PATH"] = f"{MPIRUN.parent}{os.pathsep}{environment['PATH']}"
    environment["PYTHONPATH"] = f"{PACKAGE}{os.pathsep}{COMPAT}"
    command = [*command, sys.executable, SCRIPT]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False)


def found(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Returns the settings of rank 0's sidecar that its work shows."""
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line.partition("found ")[2] for line in done.stdout.splitlines() if "found " in line]
    report: dict[str, Any] = json.loads(line)
    return report


def test_by_default_operations_are_fused_on_all_cores() -> None:
    report = found(started(PLAIN))
    assert report["ronde_fused_tensors_total"] >= 1200
    assert report["cores"] == sorted(os.sched_getaffinity(0))


def test_variables_take_effect_under_mpirun(folder: pathlib.Path) -> None:
    core = min(os.sched_getaffinity(0))
    variables = {"FUSION_THRESHOLD": "0", "THREAD_AFFINITY": str(core), "LOG_LEVEL": "DEBUG"}
    variables["TIMELINE"] = str(folder / "timeline.json")
    done = started(PLAIN, **{f"HOROVOD_{name}": value for name, value in variables.items()})
    assert found(done) == {"ronde_fused_tensors_total": 0, "ronde_operations_scheduled_total": 0, "cores": [core]}
    assert "DEBUG" in done.stderr
    assert "allreduce.step" in (folder / "timeline.json").read_text()


def test_the_variables_of_a_search_take_effect_under_mpirun(folder: pathlib.Path) -> None:
    log = folder / "search.csv"
    variables = {"": "1", "_LOG": str(log), "_WARMUP_SAMPLES": "0", "_STEPS_PER_SAMPLE": "1"}
    variables["_BAYES_OPT_MAX_SAMPLES"] = "2"
    given = [word for name, value in variables.items() for word in ("-x", f"HOROVOD_AUTOTUNE{name}={value}")]
    found(started([*PLAIN, *given]))
    header, *rows = log.read_text().splitlines()
    assert header.startswith("hierarchical_allreduce,")
    assert len(rows) == 3, "two samples, and the outcome"


def test_flags_take_effect_with_mpi(folder: pathlib.Path) -> None:
    core = min(os.sched_getaffinity(0))
    flags = ["--fusion-threshold-mb", "0", "--thread-affinity", str(core)]
    flags += ["--log-level", "DEBUG", "--timeline-filename", str(folder / "timeline.json")]
    done = started([*BY_HOROVODRUN, *flags])
    assert found(done) == {"ronde_fused_tensors_total": 0, "ronde_operations_scheduled_total": 0, "cores": [core]}
    assert "DEBUG" in done.stderr
    assert "allreduce.step" in (folder / "timeline.json").read_text()


@pytest.mark.parametrize("way", ["a variable", "a flag"])
def test_the_stall_shutdown_time_takes_effect(way: str) -> None:
    names = ["HOROVOD_STALL_CHECK_TIME_SECONDS", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]
    flags = [f"--stall-check-{name}-time-seconds=1" for name in ("warning", "shutdown")]
    done = started([*BY_HOROVODRUN, *flags]) if way == "a flag" else started(PLAIN, **dict.fromkeys(names, "1"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stalled" in done.stdout
    assert "alone" in done.stdout


def test_an_invalid_number_is_reported(folder: pathlib.Path) -> None:
    for name, text in (("FUSION_THRESHOLD", "a whole number of bytes"), ("START_TIMEOUT", "a number of seconds")):
        done = started(PLAIN, **{f"HOROVOD_{name}": "many"})
        assert done.returncode != 0
        assert f"HOROVOD_{name} is " in done.stderr, done.stderr
        assert text in done.stderr
    # After a failure the directory in which the ranks meet stays: it has the reason for those that come later.
    for left in folder.glob("ronde-ranks-*"):
        shutil.rmtree(left)


def test_settings_take_effect_on_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With several hosts, repeated steps also run ahead, which requires the request cache."""
    counted = ["ronde_fused_tensors_total", "ronde_operations_scheduled_total"]

    def counts(*flags: str) -> list[bool]:
        report = found(on_hosts(hosts, *flags, sys.executable, SCRIPT, slots=1))
        return [report[name] > 0 for name in counted]

    with two_hosts() as hosts:
        assert counts() == [True, True]
        assert counts("--fusion-threshold-mb", "0", "--cache-capacity", "0") == [False, False]
        monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
        monkeypatch.setenv("HOROVOD_CACHE_CAPACITY", "0")
        assert counts() == [False, False]
