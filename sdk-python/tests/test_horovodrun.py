"""`horovodrun`: the translation of each flag, notes about flags without effect, and jobs that it starts."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from functools import lru_cache
from typing import Any

import pytest
from conftest import PACKAGE, WORKERS, ronde_binary

from horovod.runner import check_build, config_file, flags, launch, run, translation
from horovod.runner.common.util import hosts

COMPAT = PACKAGE.parent / "horovod-compat" / "src"
TIMEOUT_S = 180


def translated(*arguments: str) -> tuple[list[str], list[str]]:
    """Returns the options of `ronde run` for a command line, and the notes."""
    given, notes = launch.parse(arguments)
    given.pop("command")
    result = translation.translate(given)
    return result.options, notes + result.notes


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("-np 4", "--num-proc=4"),
        ("--num-proc 4", "--num-proc=4"),
        ("-np 2 -H a:1,b:1", "--num-proc=2 --hosts=a:1,b:1"),
        ("--hosts a:1", "--hosts=a:1"),
        ("--start-timeout 5", "--start-timeout=5"),
        ("--network-interfaces eth0,eth1", "--network-interfaces=eth0,eth1"),
        ("--network-interface eth0 --network-interface eth1", "--network-interfaces=eth0,eth1"),
        ("--output-filename out", "--output-filename=out"),
        ("--verbose", "--verbose"),
        ("-p 2222 -i key", "--ssh-port=2222 --ssh-identity-file=key"),
        ("--ssh-port 22 --ssh-identity-file key", "--ssh-port=22 --ssh-identity-file=key"),
        ("--fusion-threshold-mb 32", "--fusion-threshold-mb=32"),
        ("--cache-capacity 7", "--cache-capacity=7"),
        ("--hierarchical-allreduce", "--hierarchical-allreduce"),
        ("--no-hierarchical-allreduce", "--no-hierarchical-allreduce"),
        ("--timeline-filename t.json", "--timeline-filename=t.json"),
        ("--timeline-filename t.json --timeline-mark-cycles", "--timeline-filename=t.json --timeline-mark-cycles"),
        ("--timeline-filename DYNAMIC", "--timeline-filename=DYNAMIC"),
        ("--timeline-mark-cycles", "--timeline-mark-cycles"),
        ("--no-timeline-mark-cycles", "--no-timeline-mark-cycles"),
        ("--stall-check", "--stall-check"),
        ("--no-stall-check", "--no-stall-check"),
        ("--stall-check-warning-time-seconds 9", "--stall-check-warning-time-seconds=9"),
        ("--stall-check-shutdown-time-seconds 10", "--stall-check-shutdown-time-seconds=10"),
        ("--thread-affinity 1", "--thread-affinity=1"),
        ("--log-level TRACE", "--log-level=trace"),
        ("--log-level debug", "--log-level=debug"),
        ("--log-level INFO", "--log-level=info"),
        ("--log-level WARNING", "--log-level=warn"),
        ("--log-level ERROR", "--log-level=error"),
        ("--log-level FATAL", "--log-level=error"),
        ("--log-with-timestamp", "--log-with-timestamp"),
        ("--log-without-timestamp", "--log-without-timestamp"),
        ("-prefix-timestamp", "--prefix-output-with-timestamp"),
        ("--prefix-output-with-timestamp", "--prefix-output-with-timestamp"),
        ("--autotune", "--autotune"),
        ("--no-autotune", "--no-autotune"),
        ("--gloo", ""),
        ("--tcp", ""),
    ],
)
def test_supported_flags_become_options_without_a_note(arguments: str, options: str) -> None:
    assert translated(*arguments.split()) == (options.split(), [])


@pytest.mark.parametrize(
    ("arguments", "option", "note"),
    [
        ("--cycle-time-ms 3.5", None, "--cycle-time-ms has no effect here"),
        ("--hierarchical-allgather", None, "--hierarchical-allgather has no effect here"),
        ("--no-hierarchical-allgather", None, "--hierarchical-allgather has no effect here"),
        ("--torus-allreduce", None, "--torus-allreduce has no effect here"),
        ("--no-torus-allreduce", None, "--torus-allreduce has no effect here"),
        ("--disable-cache", None, "--disable-cache has no effect here"),
        ("--mpi-threads-disable", None, "with --mpi, mpi_threads_supported() returns False"),
        ("--no-mpi-threads-disable", None, "--mpi-threads-disable has no effect here"),
        ("--mpi-args=--bind-to", None, "--mpi-args has no effect here: without --mpi"),
        ("--binding-args=-x", None, "--binding-args has no effect here: without --mpi"),
        ("--num-nccl-streams 2", None, "--num-nccl-streams has no effect here"),
        ("--gloo-timeout-seconds 9", None, "--gloo-timeout-seconds has no effect here"),
        (
            "--autotune-log-file x --autotune-warmup-samples 1",
            None,
            "--autotune-... has no effect without --autotune",
        ),
        ("--autotune-gaussian-process-noise 0.5", None, "--autotune-... has no effect without --autotune"),
        ("--no-autotune --autotune-log-file x", "--no-autotune", "--autotune-... has no effect without --autotune"),
        ("--log-hide-timestamp", "--log-without-timestamp", "--log-hide-timestamp is deprecated"),
        ("--no-log-hide-timestamp", "--log-with-timestamp", "--log-hide-timestamp is deprecated"),
        ("--network-interface a,b", "--network-interfaces=a,b", "several names in --network-interface are deprecated"),
    ],
)
def test_ignored_flags_print_one_note_each(arguments: str, option: str | None, note: str) -> None:
    options, notes = translated(*arguments.split())
    assert options == ([option] if option else [])
    assert len(notes) == 1
    assert note in notes[0]


def test_flags_of_a_search_become_options_of_the_same_name() -> None:
    flags = ["log-file=a.csv", "warmup-samples=1", "steps-per-sample=2", "bayes-opt-max-samples=3"]
    flags = [f"--autotune-{flag}" for flag in [*flags, "gaussian-process-noise=0.5"]]
    assert translated("--autotune", *flags) == (["--autotune", *flags], [])


def test_a_search_keeps_a_threshold_that_is_given() -> None:
    options, notes = translated("--autotune", "--fusion-threshold-mb", "8")
    assert "--autotune-parameters=chunk-bytes,lanes" in options
    assert "--fusion-threshold-mb=8" in options
    assert notes == []


def test_every_flag_is_classified() -> None:
    """Each flag takes effect or prints a note."""
    known = {*translation._VALUES, *translation._SWITCHES, *translation.IGNORED, *translation._ELASTIC}
    known |= {*translation._SEARCH, *launch.STARTERS, "tcp_flag", "autotune", "log_level", "log_hide_timestamp"}
    known |= {"network_interface", "network_interfaces", "check_build", "config_file", "command", "help", "version"}
    assert {action.dest for action in flags.parser()._actions} == known


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"hosts": "a:1,b"}, "Invalid host input: 'b' is not host:slots"),
        ({"hosts": "a:x"}, "Invalid host input"),
        ({"hosts": "a b:1"}, "Invalid host input"),
        ({"hosts": ""}, "Invalid host input"),
        ({"hosts": "a:1,b:2", "num_proc": 4}, r"Requested more processes \(4\) than there are available slots \(3\)"),
        ({"num_proc": 0}, "at least 1"),
        ({"hosts": "a:1", "hostfile": "f"}, "both given"),
        ({"hostfile": "/no/such/file"}, "cannot read the host file /no/such/file"),
    ],
)
def test_wrong_hosts_are_value_errors(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        translation.translate(given)


def test_host_files(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("alpha slots=4\n\n# the old one\n10.0.0.2 slots = 2 # slow\n[fd00::1]:1\n")
    assert hosts.parse_host_files(str(file)) == "alpha:4,10.0.0.2:2,[fd00::1]:1"
    assert hosts.parse_host_file(str(file)) == [("alpha", 4), ("10.0.0.2", 2), ("[fd00::1]", 1)]
    assert hosts.parse_hosts("[fd00::1]:2, beta-1.x:3") == [("[fd00::1]", 2), ("beta-1.x", 3)]
    file.write_text("alpha slots=4\nbeta cpus=1\n")
    with pytest.raises(ValueError, match=r"Invalid host input: line 2 of .*'beta cpus=1'"):
        hosts.parse_host_file(str(file))


CONFIG = """\
# everything that Horovod's files may contain
controller: gloo
params:
    fusion_threshold_mb: 32   # in MB
    cycle_time_ms: 2.5
    cache_capacity: 2048
    hierarchical_allreduce: true
    hierarchical_allgather: no
    torus_allreduce: false
autotune:
    enabled: false
    log_file: "a # b.csv"
    warmup_samples: 5
    steps_per_sample: 20
    bayes_opt_max_samples: 50
    gaussian_process_noise: 0.9
timeline:
  filename: 't.json'
  mark_cycles: true
stall_check:
    enabled: true
    warning_time_seconds: 90
    shutdown_time_seconds: 180
library_options:
    mpi_threads_disable: true
    num_nccl_streams: 2
    thread_affinity: 1
    gloo_timeout_seconds: 60

logging:
    level: INFO
    with_timestamp: false
    hide_timestamp: true
verbose:
extras:
    answer: 42
"""


@pytest.fixture
def config(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def test_a_configuration_file_is_equivalent_to_its_flags(config: pathlib.Path) -> None:
    given, notes = launch.parse(["--config-file", str(config)])
    assert given == {
        "command": [],
        "use_gloo": True,
        "fusion_threshold_mb": 32,
        "cycle_time_ms": 2.5,
        "cache_capacity": 2048,
        "hierarchical_allreduce": True,
        "hierarchical_allgather": False,
        "torus_allreduce": False,
        "autotune": False,
        "autotune_log_file": "a # b.csv",
        "autotune_warmup_samples": 5,
        "autotune_steps_per_sample": 20,
        "autotune_bayes_opt_max_samples": 50,
        "autotune_gaussian_process_noise": 0.9,
        "timeline_filename": "t.json",
        "timeline_mark_cycles": True,
        "no_stall_check": False,
        "stall_check_warning_time_seconds": 90,
        "stall_check_shutdown_time_seconds": 180,
        "mpi_threads_disable": True,
        "num_nccl_streams": 2,
        "thread_affinity": 1,
        "gloo_timeout_seconds": 60,
        "log_level": "INFO",
        "log_with_timestamp": False,
    }
    unknown = ["logging.hide_timestamp", "verbose", "extras", "extras.answer"]
    assert notes == [f"{config}: {key} is not a setting of Horovod and has no effect" for key in unknown]


@pytest.mark.parametrize("is_file_first", [False, True])
def test_command_line_flags_override_the_file_in_either_order(config: pathlib.Path, is_file_first: bool) -> None:
    arguments = ["--fusion-threshold-mb", "64", "--no-hierarchical-allreduce", "--log-with-timestamp", "--mpi"]
    file = ["--config-file", str(config)]
    given, _ = launch.parse([*file, *arguments] if is_file_first else [*arguments, *file])
    assert (given["fusion_threshold_mb"], given["hierarchical_allreduce"]) == (64, False)
    assert (given["log_with_timestamp"], given["use_mpi"], given["cache_capacity"]) == (True, True, 2048)
    assert "use_gloo" not in given


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("controller: ddl", "No such controller supported: ddl"),
        ("params:\n  fusion_threshold_mb: -1", "'-1' is not a whole number of at least 0"),
        ("params:\n  cache_capacity: many", "'many' is not a whole number"),
        ("autotune:\n  gaussian_process_noise: 1.5", "'1.5' is not a number from 0 to 1"),
        ("logging:\n  level: LOUD", "LOUD"),
        ("params:\n  cache_capacity: 1\n   cycle_time_ms: 2", "line 3: .* is not `key: value` at the depth"),
        ("params\n", "line 1"),
        ("params:\n  cache_capacity: [1, 2]", r"line 2: '\[1, 2\]' is not a plain value"),
        ("params:\n  cache_capacity: 1\n  cache_capacity: 2", "line 3: cache_capacity is given twice"),
        ("- a\n- b", "line 1"),
        ("  controller: gloo", "line 1"),
    ],
)
def test_the_error_names_an_invalid_configuration_file(tmp_path: pathlib.Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        launch.parse(["--config-file", str(path)])
    assert str(path) in str(caught.value)


def test_values_in_configuration_files() -> None:
    text = '---\ntimeline:\n  filename: "x: #y" # z\n  mark_cycles: ~\nstall_check:\n  enabled: Off\n'
    assert config_file.parse(text, "f") == {
        ("timeline", "filename"): "x: #y",
        ("timeline", "mark_cycles"): None,
        ("stall_check", "enabled"): False,
    }
    with pytest.raises(ValueError, match="cannot read the configuration file /no/such"):
        config_file.read("/no/such")


def horovodrun(*arguments: str, path: str = "", cwd: pathlib.Path | None = None) -> subprocess.CompletedProcess[str]:
    """Runs the command as it is installed, with the binary under test on PATH."""
    folder = path or str(pathlib.Path(ronde_binary()).parent)
    environment = {
        **os.environ,
        "RONDE_BIN": "",
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{PACKAGE}{os.pathsep}{COMPAT}",
    }
    command = [sys.executable, "-m", "horovod.runner.launch", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment, check=False, cwd=cwd
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("true", "the number of processes is missing: give -np N"),
        ("-np 2", "the command of the processes is missing"),
        ("-np -2 true", "argument -np/--num-proc: '-2' is not a whole number of at least 0"),
        ("-np 2 --cycle-time-ms -1 true", "'-1' is not a number of at least 0"),
        ("-np 2 --autotune-gaussian-process-noise 2 true", "'2' is not a number from 0 to 1"),
        ("-np 2 --stall-check-warning-time-seconds=-5 true", "'-5' is not a whole number"),
        ("-np 2 -H a:1 --hostfile f true", "not allowed with argument"),
        ("-np 2 --gloo --mpi true", "not allowed with argument"),
        ("-np 2 --no-stall-check --stall-check true", "not allowed with argument"),
        ("-np 2 --log-with-timestamp -prefix-timestamp true", "not allowed with argument"),
        ("-np 3 -H a:1,b:1 true", "Requested more processes (3) than there are available slots (2)"),
        ("-np 1 --config-file /no/such true", "cannot read the configuration file /no/such"),
        ("--host-discovery-script ./hosts.sh true", "the number of processes is missing"),
        ("-np 1 --max-np 2 true", "--max-np: for elastic jobs only; give --min-np or --host-discovery-script"),
        ("-np 2 --min-np 1 --mpi true", "are started by `ronde run`; leave out --mpi"),
    ],
)
def test_a_wrong_command_line_ends_with_code_2_and_a_message(arguments: str, message: str) -> None:
    done = horovodrun(*arguments.split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("horovodrun: error: ")
    assert message in done.stderr


def test_an_elastic_job_starts_with_its_smallest_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `ronde run` does without -np."""
    executed: list[list[str]] = []
    monkeypatch.setenv("RONDE_BIN", "/bin/true")
    monkeypatch.setattr(os, "execv", lambda path, words: executed.append(words))
    launch.run_commandline(["--min-np", "2", "--max-np", "4", "python", "train.py"])
    ((_, *words),) = executed
    assert words[:3] == ["run", "--min-np=2", "--max-np=4"]
    assert words[-3:] == ["--", "python", "train.py"]
    assert not [word for word in words if word.startswith("--num-proc")]


def test_the_command_of_ronde_run(tmp_path: pathlib.Path) -> None:
    """The worker's command stays unchanged, even if it resembles flags."""
    ronde = tmp_path / "ronde"
    ronde.write_text('#!/bin/sh\nfor word; do echo "<$word>"; done\n')
    ronde.chmod(0o755)
    worker = ["--", "python", "train.py", "-np", "3", "a b", "--gloo"]
    arguments = ["-np", "2", "--gloo", "--cycle-time-ms", "1", "--cache-capacity", "7"]
    done = horovodrun(*arguments, *worker, path=str(tmp_path))
    exports = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_CACHE_CAPACITY": "7"}
    exported = [f"--export={name}={value}" for name, value in exports.items()]
    words = ["run", "--num-proc=2", "--cache-capacity=7", *exported, *worker]
    assert done.stdout.splitlines() == [f"<{word}>" for word in words]
    assert done.stderr.splitlines() == [
        "horovodrun: --cycle-time-ms has no effect here: nothing waits for the end of a cycle",
    ]


def test_version_and_build() -> None:
    assert horovodrun("--version").stdout == horovodrun("-v").stdout == "0.28.1\n"
    done = horovodrun("--check-build")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0] == "Horovod v0.28.1:"
    titles = ["Available Frameworks:", "Available Controllers:", "Available Tensor Operations:"]
    assert [line for line in lines if line.startswith("Available")] == titles
    assert "    [ ] TensorFlow" in lines
    assert "    [ ] MPI" in lines, "no tensor goes through it"
    assert "    [X] ronde" in lines
    assert horovodrun("-cb").stdout == done.stdout


@pytest.mark.parametrize(("version", "mark"), [(22304, "X"), (0, " ")])
def test_nccl_is_marked_where_collectives_may_use_it(monkeypatch: pytest.MonkeyPatch, version: int, mark: str) -> None:
    monkeypatch.setattr(check_build, "nccl_built", lambda: version)
    assert f"    [{mark}] NCCL" in check_build.table().splitlines()


@pytest.mark.parametrize(("version", "mark"), [("mpirun (Open MPI) 5.0.8", "X"), ("HYDRA build details:", " ")])
def test_mpi_is_marked_where_it_can_start_processes(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, version: str, mark: str
) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(f"#!/bin/sh\necho '{version}'\n")
    mpirun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert controllers()["MPI"] == mark
    mpirun.unlink()
    assert controllers() == {"MPI": " ", "Gloo": "X", "ronde": "X"}


def controllers() -> dict[str, str]:
    _, _, after = check_build.table().partition("Available Controllers:\n")
    return {line[8:]: line[5] for line in after.partition("\n\n")[0].splitlines()}


OPTIONS = [*translation._VALUES.values(), *(flag for pair in translation._SWITCHES.values() for flag in pair if flag)]


@lru_cache
def options_of_ronde_run() -> set[str]:
    command = [ronde_binary(), "run", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True).stdout
    return set(re.findall(r"--[a-z-]+", text))


@pytest.mark.parametrize("option", [*OPTIONS, *translation._ELASTIC.values(), "--network-interfaces", "--log-level"])
def test_translated_flags_are_options_of_ronde_run(option: str) -> None:
    assert option in options_of_ronde_run()


SUMMED = """
import numpy, ronde
with ronde.connect() as client:
    client.allreduce(numpy.ones(3), name="test_allreduce")
"""


def test_a_timeline_is_written(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "timeline.json"
    done = horovodrun(
        "-np", "2", "--timeline-filename", str(file), "--timeline-mark-cycles", sys.executable, "-c", SUMMED
    )
    assert done.returncode == 0, done.stderr
    names = {event.get("name") for event in json.loads(file.read_text())}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", "CYCLE_START"} <= names


def test_stall_reports_can_be_turned_off(tmp_path: pathlib.Path) -> None:
    """The effect of flags about stalls, log level and times, on one job."""
    seen = tmp_path / "seen"
    script = WORKERS / "stall.py"
    flags_ = ["--stall-check-warning-time-seconds", "1", "--log-level", "WARNING"]
    done = horovodrun("-np", "3", *flags_, sys.executable, str(script), str(seen))
    assert done.returncode == 0, done.stderr
    assert "rank 2 has not asked for allreduce.grad.7" in done.stdout + done.stderr


WORKER = """
import os, sys
names = ["RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME"]
names += ["CONTROLLER", "FUSION_THRESHOLD"]
print(*(os.environ["HOROVOD_" + name] for name in names))
print("to stderr", file=sys.stderr)
"""


def test_a_job_with_horovods_variables_output_and_prefixes(tmp_path: pathlib.Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=4\n")
    options = ["-np", "2", "-hostfile", str(hostfile), "--output-filename", str(tmp_path / "out"), "-prefix-timestamp"]
    options += ["--gloo", "--start-timeout", "60", "--fusion-threshold-mb", "1", "--log-level", "WARNING", "--verbose"]
    done = horovodrun(*options, sys.executable, "-c", WORKER)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        text = f"{rank} 2 {rank} 2 0 1 localhost gloo 1048576\n"
        assert (tmp_path / "out" / f"rank.{rank}" / "stdout").read_text() == text
        assert (tmp_path / "out" / f"rank.{rank}" / "stderr").read_text() == "to stderr\n"
        line = next(line for line in done.stdout.splitlines() if line.endswith(f"[{rank}]<stdout>:{text.strip()}"))
        assert not line.startswith("[")


def test_the_exit_code_is_that_of_the_failed_rank() -> None:
    done = horovodrun("-np", "2", "sh", "-c", "exit 3")
    assert done.returncode == 3
    assert "exited with code 3" in done.stderr


def number(base: int) -> int:
    return base + int(os.environ["HOROVOD_RANK"])


def fail() -> None:
    raise LookupError("nothing here")


class TestFunctions:
    """`horovod.run`."""

    @pytest.fixture(autouse=True)
    def the_binary_is_there(self) -> None:
        pytest.importorskip("cloudpickle")
        ronde_binary()

    def test_results_by_rank(self) -> None:
        import horovod

        assert horovod.run(number, (5,), num_proc=2, verbose=2, start_timeout=60) == [5, 6]
        assert horovod.run(number, kwargs={"base": 1}, num_proc=1, hosts="localhost:2") == [1]

    def test_deprecated_names_warn(self) -> None:
        with pytest.warns(DeprecationWarning, match="np is deprecated, use num_proc instead"):
            assert run(number, (0,), np=2) == [0, 1]
        with pytest.warns(DeprecationWarning, match="max_np is deprecated, use max_num_proc instead"):  # noqa: SIM117
            with pytest.raises(ValueError, match="--max-np: for elastic jobs only"):
                run(number, (0,), max_np=1)

    def test_wrong_arguments(self) -> None:
        with pytest.raises(ValueError, match="use_gloo and use_mpi are both given"):
            run(number, use_gloo=True, use_mpi=True)
        with pytest.raises(ValueError, match="both given"):
            run(number, hosts="a:1", hostfile="f")
        with pytest.raises(ValueError, match="Requested more processes"):
            run(number, num_proc=3, hosts="localhost:2")
        with pytest.raises(ValueError, match="--reset-limit: for elastic jobs only"):
            run(number, reset_limit=1)
        with pytest.raises(ValueError, match="started by `ronde run`"):
            run(number, host_discovery_script="hosts.sh", use_mpi=True)
        with pytest.raises(ValueError, match="num_proc is 3, and max_num_proc is 2"):
            run(number, min_num_proc=3, max_num_proc=2, num_proc=3)

    def test_a_failure_has_horovods_message(self) -> None:
        with pytest.raises(RuntimeError, match="Horovod detected that one or more processes exited with non-zero") as e:
            run(fail, num_proc=2)
        assert "LookupError: nothing here" in str(e.value)

    def test_horovod_args_run_a_command_or_a_function(self, capfd: pytest.CaptureFixture[str]) -> None:
        arguments = launch._HorovodArgs(num_proc=2, command=["sh", "-c", "exit 4"])
        assert arguments.hosts is None
        with pytest.raises(RuntimeError, match="ended with 4"):
            launch._run(arguments)
        arguments.command, arguments.cycle_time_ms = ["true"], 3.5
        assert launch._run(arguments) is None
        assert "horovod.run: --cycle-time-ms has no effect here" in capfd.readouterr().err
        arguments.run_func = lambda: number(1)
        assert launch._run(arguments) == [1, 2]
