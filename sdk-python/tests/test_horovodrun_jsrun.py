"""`horovodrun` within LSF: the arguments of jsrun, invalid uses, and a job that a script in its place starts."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
from conftest import PACKAGE, ronde_binary
from test_horovodrun import COMPAT, TIMEOUT_S
from two_hosts import two_hosts

from horovod.runner import js_run, launch
from horovod.runner.util.lsf import LSFUtils

# As jsrun: its options, and the variables that it sets. It starts the processes of one host, or of two by `ssh`.
JSRUN = """#!{python}
import os, subprocess, sys
words, options = sys.argv[1:], {{}}
variables = dict(os.environ)
while words and words[0].startswith("--"):
    name, value = words.pop(0), words.pop(0)
    if name == "--env":
        key, equals, text = value.partition("=")
        variables[key] = text if equals else os.environ[key]
    options[name] = value
hosts, local = int(options["--nrs"]), int(options["--tasks_per_rs"])
names = os.environ.get("FAKE_HOSTS", "").split() or [None] * hosts
processes = []
for rank in range(hosts * local):
    own = dict(variables, JSM_NAMESPACE_RANK=str(rank), JSM_NAMESPACE_SIZE=str(hosts * local), PMIX_NAMESPACE="1")
    own.update(JSM_NAMESPACE_LOCAL_RANK=str(rank % local), JSM_NAMESPACE_LOCAL_SIZE=str(local))
    host = names[rank // local]
    if host is None:
        processes.append(subprocess.Popen(words, env=own))
        continue
    kept = [n + "=" + v for n, v in own.items() if n.startswith(("JSM", "RONDE_W", "PMIX", "PYTHONPATH", "RONDE_BIN"))]
    import shlex
    processes.append(subprocess.Popen(["ssh", host, shlex.join(["env", *kept, *words])]))
sys.exit(max(abs(process.wait()) for process in processes))
"""
TRAIN = """
import os, torch
import horovod.torch as hvd
hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
os.write(1, f"rank {hvd.rank()} of {hvd.size()}, {hvd.local_size()} here: {total}{os.linesep}".encode())
hvd.barrier()
"""


@pytest.fixture
def lsf(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> pathlib.Path:
    """A job of LSF on this host, with a jsrun on PATH. Returns the path of jsrun."""
    jsrun = tmp_path / "bin" / "jsrun"
    jsrun.parent.mkdir()
    jsrun.write_text(JSRUN.format(python=sys.executable))
    jsrun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{jsrun.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("LSB_JOBID", "7")
    for name in ("LSB_MCPU_HOSTS", "RONDE_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    return jsrun


def words(*arguments: str) -> list[str]:
    given, _ = launch.parse(arguments)
    given.pop("command")
    return launch.launcher_of(given).words


def test_jsrun_is_the_default_within_lsf(lsf: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert words("-np", "2")[0] == str(lsf)
    assert words("-np", "2", "--gloo")[1] == "run"
    assert words("-np", "2", "--jsrun") == words("-np", "2")
    monkeypatch.delenv("LSB_JOBID")
    monkeypatch.setenv("RONDE_BIN", "/ronde")
    assert words("-np", "2")[:2] == ["/ronde", "run"]


def test_without_jsrun_ronde_run_is_the_default(lsf: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lsf.unlink()
    monkeypatch.setenv("RONDE_BIN", "/ronde")
    assert words("-np", "2")[:2] == ["/ronde", "run"]
    with pytest.raises(ValueError, match="there is no jsrun on PATH"):
        words("-np", "2", "--jsrun")


def test_outside_of_lsf(lsf: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lsf.is_file()
    monkeypatch.delenv("LSB_JOBID")
    with pytest.raises(ValueError, match="did not detect an LSF job"):
        words("-np", "2", "--jsrun")


def test_the_arguments_of_jsrun(lsf: pathlib.Path) -> None:
    start = [str(lsf), "--nrs", "1", "--rs_per_host", "1", "--tasks_per_rs", "3"]
    assert words("-np", "3") == [*start, *js_run._BINDING]
    given = words("-np", "3", "--binding-args=--bind packed:7", "--fusion-threshold-mb", "1", "--mpi-args=-gpu -x A")
    assert given[: len(start) + 2] == [*start, "--bind", "packed:7"]
    assert "HOROVOD_FUSION_THRESHOLD=1048576" in given
    # One argument, as in Horovod: jsrun itself has no option -gpu.
    assert given[-2:] == ["--smpiargs", "-gpu -x A"]
    assert launch.launcher_of({"num_proc": 3, "mpi_args": "-gpu"}).notes == []


def test_flags_that_have_no_effect_print_a_note(lsf: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes(*arguments: str) -> list[str]:
        given, _ = launch.parse([*arguments, "-np", "2", "--network-interfaces", "eth0", "-prefix-timestamp"])
        given.pop("command")
        return [note.split(" has no effect here: ")[0] for note in launch.launcher_of(given).notes]

    assert lsf.is_file()
    monkeypatch.setenv("RONDE_BIN", "/ronde")
    timestamp, interfaces = "--prefix-output-with-timestamp", "--network-interfaces"
    assert notes() == [timestamp, interfaces]
    assert notes("-H", "alpha:1,beta:1") == [timestamp], "sidecars are started, on these interfaces"
    monkeypatch.setenv("RONDE_SOCKET", "/run/ronde")
    assert notes("-H", "alpha:1,beta:1") == [timestamp, interfaces]


def test_the_hosts_of_the_job(lsf: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RONDE_BIN", "/ronde")
    monkeypatch.setenv("LSB_MCPU_HOSTS", "batch01 1 node01 42 node02 42")
    given = words("-np", "4")
    assert given[:4] == ["/ronde", "run", "--num-proc=4", "--hosts=node01:2,node02:2"]
    started = given[given.index("--") + 1 :]
    assert started[:7] == [str(lsf), "--nrs", "2", "--rs_per_host", "1", "--tasks_per_rs", "2"]
    assert started[-5:] == ["--env", "RONDE_WORLD", "/ronde", "worker", "--"]
    monkeypatch.setenv("RONDE_SOCKET", "/run/ronde")
    assert words("-np", "4")[0] == str(lsf), "sidecars run already"
    monkeypatch.setenv("LSB_MCPU_HOSTS", "a 1 b 1")
    assert LSFUtils.get_compute_hosts() == ["a", "b"]


def test_uneven_hosts(lsf: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lsf.is_file()
    monkeypatch.setenv("LSB_MCPU_HOSTS", "node01 42 node02 42")
    with pytest.raises(ValueError, match="3 processes cannot be spread evenly over the 2 hosts of the LSF job"):
        words("-np", "3")
    with pytest.raises(ValueError, match="jsrun starts as many processes on each host, but -H gives a:2,b:1"):
        words("-np", "3", "-H", "a:2,b:1")


def environment(jsrun: pathlib.Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RONDE_", "HOROVOD_"))}
    paths = os.pathsep.join([str(jsrun.parent), os.environ["PATH"]])
    return {**kept, "RONDE_BIN": ronde_binary(), "PYTHONPATH": f"{PACKAGE}{os.pathsep}{COMPAT}", "PATH": paths, **more}


def test_a_job_on_one_host(lsf: pathlib.Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable, "-c", TRAIN]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment(lsf), check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 2, 2 here: 2.0" for rank in range(2)]


def test_a_job_on_two_hosts(lsf: pathlib.Path) -> None:
    pytest.importorskip("torch")
    with two_hosts() as hosts:
        path = os.pathsep.join([str(lsf.parent), str(hosts.folder), os.environ["PATH"]])
        variables = environment(lsf, PATH=path, FAKE_HOSTS=" ".join(hosts.addresses), TMPDIR=str(hosts.folder))
        where = ",".join(f"{each}:2" for each in hosts.addresses)
        command = [sys.executable, "-m", "horovod.runner.launch", "-np", "4", "-H", where, sys.executable, "-c", TRAIN]
        done = subprocess.run(
            hosts.on_first(command), capture_output=True, text=True, timeout=TIMEOUT_S, env=variables, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank"))
    assert lines == [f"rank {rank} of 4, 2 here: 4.0" for rank in range(4)], done.stdout + done.stderr


@pytest.fixture
def without_jsrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of LSF on a cluster that has no jsrun."""
    monkeypatch.setenv("LSB_JOBID", "7")
    monkeypatch.setattr(js_run, "is_installed", lambda: False)


@pytest.mark.parametrize(
    ("flags", "listed", "expected"),
    [
        ([], "alpha 2 beta 4", {"hosts": "alpha:2,beta:4", "num_proc": 6}),
        (["-np", "3"], "alpha 2 beta 4", {"hosts": "alpha:2,beta:4", "num_proc": 3}),
        (["-np", "3", "-H", "gamma:3"], "alpha 2", {}),
        (["-np", "3"], "", {}),
    ],
)
@pytest.mark.usefixtures("without_jsrun")
def test_hosts_are_those_of_the_lsf_job(
    flags: list[str], listed: str, expected: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LSB_MCPU_HOSTS", listed)
    given, _ = launch.parse([*flags, "python", "train.py"])
    assert launch.of_lsf(given) == expected
    # Horovod starts one process for each GPU.
    noted = launch.notes_of_lsf(given, expected)
    assert [note.partition(",")[0] for note in noted] == (
        [] if flags else ["one process is started for each of the 6 slots of the LSF job"]
    )


@pytest.mark.usefixtures("without_jsrun")
def test_a_list_of_hosts_in_another_form_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSB_MCPU_HOSTS", "alpha 2 beta")
    with pytest.raises(ValueError, match=r"not hosts and their slots; give hosts with -H"):
        launch.of_lsf({})


def test_where_jsrun_is_it_finds_the_hosts(lsf: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LSB_MCPU_HOSTS", "alpha 2 beta 4")
    assert launch.of_lsf({}) == {}


def test_a_job_of_lsf_without_jsrun_and_without_flags() -> None:
    program = "from horovod.runner.launch import run_commandline; run_commandline()"
    environment = {**os.environ, "LSB_JOBID": "7", "LSB_MCPU_HOSTS": "localhost 2", "RONDE_BIN": ronde_binary()}
    environment["PYTHONPATH"] = f"{PACKAGE}{os.pathsep}{COMPAT}"
    done = subprocess.run(
        [sys.executable, "-c", program, sys.executable, "-c", TRAIN],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "horovodrun: one process is started for each of the 2 slots of the LSF job" in done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "rank" in line)[0].endswith(
        "rank 0 of 2, 2 here: 2.0"
    ), done.stdout
