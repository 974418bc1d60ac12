"""Timelines of real jobs. The script `workers/timeline.py` asserts."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Callable

import pytest
from conftest import PACKAGE, WORKERS, WORLD_TIMEOUT_S, ronde_binary

WORLDS = [(1, 1), (2, 1), (3, 2)]
Events = list[dict[str, object]]


def events(path: pathlib.Path) -> Events:
    """What is in a file."""
    parsed: Events = json.loads(path.read_text())
    return parsed


@pytest.mark.parametrize("ring", ["0", "1"])
@pytest.mark.parametrize(("ranks", "sidecars"), WORLDS)
def test_a_session_records_one_timeline_after_another(
    world: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    ranks: int,
    sidecars: int,
    ring: str,
) -> None:
    monkeypatch.setenv("RONDE_RING", ring)
    assert world("timeline.py", ranks, sidecars, str(tmp_path), "record").count("is done") == ranks
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first.json", "fourth", "second.json", "third"]
    assert '"allreduce.fourth"' in (tmp_path / "fourth").read_text()
    assert events(tmp_path / "fourth")


def test_the_error_names_a_file_that_cannot_be_created(world: Callable[..., str], tmp_path: pathlib.Path) -> None:
    assert world("timeline.py", 2, 1, str(tmp_path), "refuse").count("is done") == 2


@pytest.mark.parametrize("sidecars", [1, 2])
def test_steps_that_run_ahead_are_recorded(world: Callable[..., str], tmp_path: pathlib.Path, sidecars: int) -> None:
    assert world("timeline.py", 2, sidecars, str(tmp_path), "ahead").count("is done") == 2


def test_a_job_is_recorded_from_its_start(world: Callable[..., str], tmp_path: pathlib.Path) -> None:
    file = tmp_path / "job.json"
    options = ("--timeline-filename", str(file), "--timeline-mark-cycles")
    world("timeline.py", 2, 2, str(tmp_path), "start", options=options)
    text = file.read_text()
    assert events(file)
    for word in ("allreduce.test_allreduce", "NEGOTIATE_ALLREDUCE", "CYCLE_START", "start_time_since_epoch_in_micros"):
        assert word in text, word


@pytest.mark.parametrize(
    ("variables", "options", "is_recorded", "is_marked"),
    [
        ({"HOROVOD_TIMELINE": "FILE", "HOROVOD_TIMELINE_MARK_CYCLES": "1"}, (), True, True),
        ({"RONDE_TIMELINE": "FILE"}, (), True, False),
        (
            {"HOROVOD_TIMELINE": "FILE", "HOROVOD_TIMELINE_MARK_CYCLES": "1"},
            ("--no-timeline-mark-cycles",),
            True,
            False,
        ),
        ({"HOROVOD_TIMELINE": "DYNAMIC"}, (), False, False),
        ({"HOROVOD_TIMELINE": "FILE"}, ("--timeline-filename", "DYNAMIC"), False, False),
    ],
)
def test_variables_of_ronde_and_horovod_take_effect(
    world: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    variables: dict[str, str],
    options: tuple[str, ...],
    is_recorded: bool,
    is_marked: bool,
) -> None:
    file = tmp_path / "job.json"
    for name, value in variables.items():
        monkeypatch.setenv(name, str(file) if value == "FILE" else value)
    world("timeline.py", 2, 1, str(tmp_path), "start", options=options)
    assert file.exists() == is_recorded
    assert ("CYCLE_START" in file.read_text() if is_recorded else False) == is_marked
    assert not (tmp_path / "DYNAMIC").exists()


def test_a_timeline_that_cannot_be_written_fails_the_start(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "nowhere" / "job.json"
    done = run("start", tmp_path, "--timeline-filename", str(file))
    assert done.returncode != 0
    assert f"the timeline {file} cannot be recorded: No such file or directory" in done.stderr, done.stderr


def test_a_killed_process_leaves_a_complete_file(tmp_path: pathlib.Path) -> None:
    assert run("die", tmp_path).returncode != 0
    assert any(event.get("name") == "NEGOTIATE_ALLREDUCE" for event in events(tmp_path / "killed"))


def run(what: str, directory: pathlib.Path, *options: str) -> subprocess.CompletedProcess[str]:
    """A job of two ranks that may fail."""
    worker = [sys.executable, str(WORKERS / "timeline.py"), str(directory), what]
    command = [ronde_binary(), "run", "-np", "2", "-x", f"PYTHONPATH={PACKAGE}", *options, *worker]
    return subprocess.run(command, capture_output=True, text=True, timeout=WORLD_TIMEOUT_S, check=False)
