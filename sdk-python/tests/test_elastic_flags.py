"""Horovod's flags and arguments for elastic jobs, as options of `ronde run`."""

from __future__ import annotations

import os
from typing import Any

import pytest

import horovod.runner
from horovod.runner import launch, translation


def options(*arguments: str) -> list[str]:
    given, _ = launch.parse(["-np", "2", *arguments])
    given.pop("command")
    given.pop("num_proc")
    found = translation.translate(given)
    assert found.exports["HOROVOD_ELASTIC"] == "1"
    assert found.notes == []
    return found.options


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--min-np 1", ["--min-np=1"]),
        ("--min-num-proc 1 --max-num-proc 4", ["--min-np=1", "--max-np=4"]),
        (
            "--host-discovery-script ./hosts.sh --slots-per-host 2",
            ["--slots-per-host=2", "--host-discovery-script=./hosts.sh"],
        ),
        ("--min-np 1 --elastic-timeout 60 --reset-limit 3", ["--min-np=1", "--elastic-timeout=60", "--reset-limit=3"]),
        ("--min-np 1 --blacklist-cooldown-range 10 100", ["--min-np=1", "--blacklist-cooldown-range", "10", "100"]),
    ],
)
def test_elastic_flags_become_options(arguments: str, expected: list[str]) -> None:
    assert options(*arguments.split()) == expected


def test_a_job_that_is_not_elastic_has_no_variable() -> None:
    assert "HOROVOD_ELASTIC" not in translation.translate({"num_proc": 2}).exports


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"max_num_proc": 2}, "--max-np: for elastic jobs only; give --min-np or --host-discovery-script"),
        ({"cooldown_range": [1, 2], "slots": 1}, "--slots-per-host, --blacklist-cooldown-range: for elastic jobs only"),
        ({"min_num_proc": 1, "use_mpi": True}, "--min-np: the processes of elastic jobs are started by `ronde run`"),
        ({"min_num_proc": 1, "use_jsrun": True}, "leave out --mpi and --jsrun"),
        ({"min_num_proc": 3, "num_proc": 2}, "min_num_proc is 3, and num_proc is 2"),
        ({"min_num_proc": 1, "num_proc": 4, "max_num_proc": 3}, "num_proc is 4, and max_num_proc is 3"),
        ({"min_num_proc": 1, "hosts": "a:1", "num_proc": 2}, "Requested more processes"),
    ],
)
def test_flags_that_contradict_each_other(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        translation.translate(given)


def test_run_elastic_is_for_elastic_jobs() -> None:
    with pytest.raises(ValueError, match="an elastic job needs min_num_proc or host_discovery_script"):
        launch._run_elastic(launch._HorovodArgs(num_proc=1, command=["true"]))


def test_within_lsf_elastic_jobs_are_started_by_ronde_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_BIN", "/bin/true")
    monkeypatch.setattr("horovod.runner.js_run.is_default", lambda given: pytest.fail("jsrun was considered"))
    words = launch.launcher_of({"num_proc": 2, "min_num_proc": 1}).words
    assert words[1:4] == ["run", "--min-np=1", "--num-proc=2"]


def test_a_function_runs_with_the_elastic_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """At least as many processes as the job needs; the results are those at its end."""
    seen: list[Any] = []

    def run_by(words: Any, call: Any, size: Any, executable: Any) -> list[str]:
        seen.append((words("report.json")[1:], call.args, size, executable))
        return ["result"]

    monkeypatch.setenv("RONDE_BIN", "/bin/true")
    monkeypatch.setattr(horovod.runner, "run_by", run_by)
    assert horovod.run(os.getpid, min_num_proc=2, slots=1, cooldown_range=[1, 2], executable="python") == ["result"]
    ((words, args, size, executable),) = seen
    assert words[0] == "run"
    assert words[-3:] == ["--report", "report.json", "--"]
    assert {"--min-np=2", "--num-proc=2", "--slots-per-host=1", "--export=HOROVOD_ELASTIC=1"} <= set(words)
    assert words[words.index("--blacklist-cooldown-range") :][1:3] == ["1", "2"]
    assert (args, size, executable) == ((), None, "python")
