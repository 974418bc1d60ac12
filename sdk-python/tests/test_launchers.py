"""Processes of launchers other than ronde's: one of several processes must not silently train alone."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from conftest import PACKAGE, ronde_binary
from two_hosts import two_hosts

import ronde
from horovod.runner.common.util import env
from ronde import without_launcher

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPAT = PACKAGE.parent / "horovod-compat" / "src"
ENVIRONMENTS = PACKAGE.parent.parent / "tests" / "setup" / "environment.py"
TIMEOUT_S = 150
# Of all launchers' environments, recorded ones are in sdk-rust/src/launcher/tests.rs; here is one of each kind.
SEVERAL = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"},
    "env://": {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "trainer-0"},
    "torchrun options": {"PET_NNODES": "2", "PET_NODE_RANK": "0"},
    "srun": {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"},
    "mpiexec.hydra": {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"},
    "pmi": {"PMI_SIZE": "2", "PMI_RANK": "0"},
    "pmix": {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-vm-1@1"},
    "mpirun": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
    "horovodrun": {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"},
    "ronde run": {"RONDE_SIZE": "2"},
}
ONE = {
    "env://": {"WORLD_SIZE": "1", "RANK": "0"},
    "a batch job": {"SLURM_JOB_ID": "2", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "an allocation's shell": {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "mpiexec.hydra": {"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"},
    "nothing": {},
}
FOUND = {
    "jsrun": {
        "JSM_NAMESPACE_SIZE": "4",
        "JSM_NAMESPACE_RANK": "1",
        "JSM_NAMESPACE_LOCAL_SIZE": "2",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
    },
    "mpirun": {
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    },
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process without a job, which records the sidecar that it would start."""
    for name in [name for name in os.environ if re.match(r"RONDE_(?!BIN)|HOROVOD_|SLURM_|PMI|OMPI_|WORLD_SIZE", name)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(without_launcher, "_is_served", lambda: False)
    monkeypatch.setattr(without_launcher, "_own_sidecar", lambda ranks: f"a sidecar for {ranks}")
    return monkeypatch


@pytest.mark.parametrize("launcher", SEVERAL)
def test_one_of_several_processes_is_rejected(started: pytest.MonkeyPatch, launcher: str) -> None:
    for name, value in SEVERAL[launcher].items():
        started.setenv(name, value)
    for begin in (lambda: without_launcher.settings_without_launcher({}), ronde.connect):
        with pytest.raises(ronde.RondeError, match="but there is no job of ronde") as raised:
            begin()
        assert (raised.value.cause, raised.value.blame) == ("settings", "caller")
        text = str(raised.value)
        named = {name: value for name, value in SEVERAL[launcher].items() if re.search("SIZE|NNODES|STEP_NUM", name)}
        for name, value in (named or SEVERAL[launcher]).items():
            assert f"{name}={value}" in text, text
        assert "ronde run -np " in text
        assert "Nothing was started, because each of these processes would be a job of one rank" in text


@pytest.mark.parametrize("launcher", ONE)
def test_one_process_is_a_job_of_one_rank(started: pytest.MonkeyPatch, launcher: str) -> None:
    for name, value in ONE[launcher].items():
        started.setenv(name, value)
    assert without_launcher.settings_without_launcher({}) == {"socket": "a sidecar for 1", "job": "local", "rank": 0}
    with pytest.raises(ronde.RondeError, match="RONDE_SOCKET is not set") as raised:
        ronde.connect()
    assert "no job of ronde" not in str(raised.value)


@pytest.mark.parametrize("launcher", FOUND)
def test_several_hosts_of_mpi_are_rejected(started: pytest.MonkeyPatch, launcher: str) -> None:
    for name, value in FOUND[launcher].items():
        started.setenv(name, value)
    with pytest.raises(ronde.RondeError, match="mpirun has started 4 processes, 2 of them on this host"):
        without_launcher.settings_without_launcher({})


@pytest.mark.parametrize("given", [{"RONDE_SOCKET": "/nowhere"}, {"RONDE_JOB": "night"}])
def test_a_job_of_ronde_takes_precedence(started: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    for name, value in {**SEVERAL["torchrun"], **given}.items():
        started.setenv(name, value)
    assert without_launcher.settings_without_launcher({}) == {}
    assert without_launcher.settings_without_launcher({"socket": "/given"}) == {}


def test_rank_and_size_of_any_launcher(started: pytest.MonkeyPatch) -> None:
    assert env.get_env_rank_and_size() == (0, 1)
    for name, value in SEVERAL["mpirun"].items():
        started.setenv(name, value)
    assert env.get_env_rank_and_size() == (0, 2)
    started.delenv("OMPI_COMM_WORLD_SIZE")
    with pytest.raises(RuntimeError, match="mpirun has set rank 0 and size None"):
        env.get_env_rank_and_size()


# Every way to begin, under the launcher itself: what each raises, or "one rank" when it has begun.
BEGIN = """
import os, sys
import torch.distributed
import horovod.torch, ronde, ronde.torch, ronde.torch.distributed
beginnings = {
    "connect": ronde.connect,
    "init": ronde.torch.init,
    "horovod": horovod.torch.init,
    "group": ronde.torch.distributed.init_process_group,
    "url": lambda: torch.distributed.init_process_group("ronde", init_method="ronde://"),
}
if "MASTER_ADDR" in os.environ:
    beginnings["variables"] = lambda: torch.distributed.init_process_group("ronde")
for name, begin in beginnings.items():
    try:
        begin()
        line = f"{name}: {ronde.torch.size()} rank"
        ronde.torch.shutdown()
    except ronde.RondeError as error:
        line = f"{name}: {error}"
    # In one write: lines of processes that share a pipe must not mix.
    os.write(1, f"{os.linesep}{line.replace(os.linesep, ' ')}{os.linesep}".encode())
    if "group" in name and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


def run(command: list[str], *path: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """A launcher's command, in an environment without a job."""
    pytest.importorskip("torch")
    # All but the launchers' and ronde's own variables.
    kept = {
        name: value for name, value in os.environ.items() if not re.match(r"RONDE_|HOROVOD_|OMPI_|PMI|SLURM_", name)
    }
    kept.update(
        RONDE_BIN=ronde_binary(),
        PYTHONPATH=f"{PACKAGE}{os.pathsep}{COMPAT}",
        PATH=os.pathsep.join([*map(str, path), os.environ["PATH"]]),
    )
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=kept, check=False)


def beside_python(name: str) -> str:
    path = pathlib.Path(sys.executable).with_name(name)
    if not path.is_file():
        pytest.skip(f"no {name} beside this Python; `make setup` installs it")
    return str(path)


def mpich() -> str:
    """Returns MPICH's launcher, which has a separate environment."""
    # By the Python that the environments are made by, on whose packages their names depend.
    command = [getattr(sys, "_base_executable", sys.executable), str(ENVIRONMENTS), "path", "mpich"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": ""})
    path = pathlib.Path(found.stdout.strip()).with_name("mpiexec")
    if not path.is_file():
        pytest.skip("MPICH is not installed; `make setup` installs it")
    return str(path)


def ways(out: str, text: str) -> list[str]:
    """The ways to begin on whose line the text is."""
    lines = [line for line in out.splitlines() if re.match(r"(connect|init|horovod|group|url|variables): ", line)]
    return sorted(line.partition(":")[0] for line in lines if text in line)


ALL = sorted(["connect", "init", "horovod", "group", "url"] * 2)


def test_torchrun(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "begin.py"
    script.write_text(BEGIN)
    done = run([beside_python("torchrun"), "--nproc-per-node", "2", str(script)])
    text = "torchrun has started this process as one of 2 (WORLD_SIZE=2"
    assert ways(done.stdout, text) == sorted([*ALL, "variables", "variables"]), f"{done.stdout}\n{done.stderr}"


def test_the_launcher_of_mpich() -> None:
    done = run([mpich(), "-n", "2", sys.executable, "-c", BEGIN])
    text = "the mpiexec or mpirun of MPICH or Intel MPI has started this process as one of 2 (PMI_SIZE=2"
    assert ways(done.stdout, text) == ALL, f"{done.stdout}\n{done.stderr}"


def test_prterun_which_sets_no_size() -> None:
    done = run(
        [
            beside_python("prterun"),
            "--allow-run-as-root",
            "-n",
            "2",
            "--map-by",
            ":OVERSUBSCRIBE",
            sys.executable,
            "-c",
            BEGIN,
        ]
    )
    text = "a launcher that speaks PMIx (such as prterun) has started this process as one of several (PMIX_RANK="
    assert ways(done.stdout, text) == ALL, f"{done.stdout}\n{done.stderr}"


def test_launchers_of_one_process() -> None:
    """Their process is a job of one rank, but for `connect`, which takes a job that is there."""
    for command in ([beside_python("torchrun"), "--nproc-per-node", "1", "--no-python"], [mpich(), "-n", "1"]):
        done = run([*command, sys.executable, "-c", BEGIN])
        begun = [way for way in ways(done.stdout, "1 rank") if way != "variables"]
        assert begun == ["group", "horovod", "init", "url"], f"{done.stdout}\n{done.stderr}"


@pytest.fixture
def spread() -> Iterator[list[str]]:
    """A command that runs a process of Open MPI's mpirun on each of two hosts."""
    mpirun = beside_python("mpirun")
    with two_hosts() as hosts:
        words = [mpirun, "--allow-run-as-root", "-np", "2", "-H", ",".join(f"{each}:1" for each in hosts.addresses)]
        yield hosts.on_first(
            [
                "env",
                f"PATH={hosts.folder}{os.pathsep}{os.environ['PATH']}",
                f"TMPDIR={hosts.folder}",
                *words,
                "-x",
                "PYTHONPATH",
                "-x",
                "RONDE_BIN",
            ]
        )


def test_mpirun_on_two_hosts(spread: list[str]) -> None:
    done = run([*spread, sys.executable, "-c", BEGIN])
    text = "mpirun has started 2 processes, 1 of them on this host, and no sidecar"
    assert ways(done.stdout, text) == sorted(["init", "horovod", "group", "url"] * 2), f"{done.stdout}\n{done.stderr}"
    assert ways(done.stdout, "Open MPI's mpirun has started this process as one of 2") == ["connect"] * 2
