"""Processes of launchers other than ronde's: those of one host share a sidecar, and none silently trains alone."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING

import pytest
from conftest import PACKAGE, leave_out, ronde_binary
from ports import free_port
from two_hosts import two_hosts

import ronde
from horovod.runner.common.util import env
from ronde import _ronde, without_launcher

if TYPE_CHECKING:
    from collections.abc import Iterator

COMPAT = PACKAGE.parent / "horovod-compat" / "src"
ENVIRONMENTS = PACKAGE.parent.parent / "tests" / "setup" / "environment.py"
TIMEOUT_S = 150
# No number of processes, or none of those on this host.
# Of all launchers' environments, recorded ones are in sdk-rust/src/launcher/tests.rs; here is one of each kind.
SEVERAL = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"},
    "indexed job": {"JOB_COMPLETION_INDEX": "0"},
    "env://": {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "trainer-0"},
    "torchrun options": {"PET_NNODES": "2", "PET_NODE_RANK": "0"},
    "srun": {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8", "SLURM_NTASKS": "8"},
    "mpiexec.hydra": {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0"},
    "pmi": {"PMI_SIZE": "2", "PMI_RANK": "0"},
    "pmix": {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-vm-1@1"},
    "mpirun": {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"},
    "horovodrun": {"HOROVOD_SIZE": "2", "HOROVOD_RANK": "0"},
    "ronde run": {"RONDE_SIZE": "2", "RONDE_RANK": "0", "RONDE_LOCAL_SIZE": "2"},
}
ONE = {
    "env://": {"WORLD_SIZE": "1", "RANK": "0"},
    "a batch job": {"SLURM_JOB_ID": "2", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    "an allocation's shell": {"SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
    "mpiexec.hydra": {"PMI_SIZE": "1", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"},
    "nothing": {},
}
SPREAD = {
    "torchrun": {
        "TORCHELASTIC_RUN_ID": "x",
        "WORLD_SIZE": "4",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    },
    "srun": {
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_NODEID": "0",
    },
    "mpiexec.hydra": {"PMI_SIZE": "4", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
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
    names = r"RONDE_(?!BIN)|HOROVOD_|SLURM_|PMI|OMPI_|WORLD_SIZE|TORCHELASTIC_"
    for name in [name for name in os.environ if re.match(names, name)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(without_launcher, "_is_served", lambda: False)
    monkeypatch.setattr(without_launcher, "_sidecar_for_one", lambda: "a sidecar for 1")
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


@pytest.mark.parametrize("launcher", SPREAD)
def test_several_hosts_are_rejected(started: pytest.MonkeyPatch, launcher: str) -> None:
    for name, value in SPREAD[launcher].items():
        started.setenv(name, value)
    with pytest.raises(ronde.RondeError) as raised:
        without_launcher.settings_without_launcher({})
    assert f"{launcher} has started 4 processes, 2 of them on this host, and no sidecar" in str(raised.value)
    for way in ("`ronde run -np N -H", "`ronde sidecar` on each host", "--certs", "--job-secret-file", "RONDE_SOCKET"):
        assert way in str(raised.value)
    assert raised.value.cause == "settings"


# As the launcher passes them to rank 1 of 2 on one host.
ONE_HOST = {
    "torchrun": {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "2",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    },
    "srun": {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_NODEID": "0",
    },
    "mpiexec.hydra": {"PMI_SIZE": "2", "PMI_RANK": "1", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1"},
    "jsrun": {
        "JSM_NAMESPACE_SIZE": "2",
        "JSM_NAMESPACE_RANK": "1",
        "JSM_NAMESPACE_LOCAL_SIZE": "2",
        "JSM_NAMESPACE_LOCAL_RANK": "1",
        "LSB_JOBID": "77",
        "PMIX_NAMESPACE": "1",
    },
    "env://": {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "2", "RANK": "1"},
}
RANK_OF = {"torchrun": "RANK", "srun": "SLURM_PROCID", "mpiexec.hydra": "PMI_RANK", "jsrun": "JSM_NAMESPACE_RANK"}
JOIN = """
import sys, time
import ronde
from ronde.without_launcher import settings_without_launcher
try:
    settings = settings_without_launcher({})
    with ronde.connect(**settings) as client:
        client.barrier()
        # At once, as the launcher joins what its processes write.
        sys.stdout.write(f"rank {client.rank} of {client.size} {settings['job']}\\n")
except ronde.RondeError as error:
    print(type(error).__name__, error.cause, str(error).replace("\\n", " "), flush=True)
"""


FORKING = """
import os, sys
import ronde
from ronde.without_launcher import settings_without_launcher
settings = settings_without_launcher({})
child = os.fork()
if child == 0:
    sys.exit(0)
os.waitpid(child, 0)
print("after the child", len(os.listdir(os.environ["TMPDIR"])), flush=True)
with ronde.connect(**settings) as client:
    client.barrier()
"""


def start(
    tmp_path: pathlib.Path, given: dict[str, str], *wrapper: str, program: str = JOIN, **changed: str
) -> subprocess.Popen[str]:
    """Starts a rank with a launcher's variables."""
    environment = {**without_jobs(), **given, "TMPDIR": str(tmp_path), "RONDE_BIN": ronde_binary(), **changed}
    environment["PYTHONPATH"] = str(PACKAGE)
    command = [*wrapper, sys.executable, "-c", program]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outputs(*ranks: subprocess.Popen[str]) -> list[str]:
    try:
        return [rank.communicate(timeout=TIMEOUT_S)[0].strip() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize("launcher", ONE_HOST)
def test_processes_of_one_host_share_a_sidecar(tmp_path: pathlib.Path, launcher: str) -> None:
    given, name = ONE_HOST[launcher], RANK_OF.get(launcher, "RANK")
    lines = outputs(start(tmp_path, given), start(tmp_path, given, **{name: "0"}))
    assert [line.rpartition(" ")[0] for line in lines] == ["rank 1 of 2", "rank 0 of 2"], lines
    assert lines[0].rpartition(" ")[2] == lines[1].rpartition(" ")[2]
    assert not list(tmp_path.iterdir()), "the sidecar and its directory are gone"


def unshare(*options: str) -> list[str]:
    """Returns a command that runs another one in namespaces of its own, as a container's."""
    command = ["unshare", *options]
    if os.geteuid() != 0 or subprocess.run([*command, "true"], capture_output=True, check=False).returncode != 0:
        leave_out("netns", "this user cannot make namespaces, in which each rank runs here")
    return command


@pytest.mark.parametrize("options", [["--mount"], ["--mount", "--pid", "--fork", "--mount-proc"]])
def test_each_rank_in_a_container_of_its_own(tmp_path: pathlib.Path, options: list[str]) -> None:
    """As with `mpirun -n 2 apptainer exec IMAGE python ...`: they share the directory for temporary files."""
    wrapper, given = unshare(*options), ONE_HOST["torchrun"]
    lines = outputs(start(tmp_path, given, *wrapper), start(tmp_path, given, *wrapper, RANK="0"))
    assert [line.rpartition(" ")[0] for line in lines] == ["rank 1 of 2", "rank 0 of 2"], lines


def test_ranks_in_containers_that_share_no_directory(tmp_path: pathlib.Path) -> None:
    """Each misses the other one, and says what containers have to share."""
    given = {**ONE_HOST["torchrun"], "RONDE_START_TIMEOUT": "3"}
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    lines = outputs(*(start(folder, given, RANK=str(rank)) for rank, folder in enumerate(folders)))
    for line, folder, missing in zip(lines, folders, ("rank 1 of 2", "rank 0 of 2")):
        assert line.startswith(f"TimedOutError start {missing} did not come within 3 s"), line
        assert f"in containers of their own, mount the directory of {folder}/ronde-ranks-" in line


def test_a_runtime_directory_that_does_not_exist(tmp_path: pathlib.Path) -> None:
    """As that of Slurm's login node, in the environment of its other nodes."""
    given, missing = ONE_HOST["srun"], str(tmp_path / "missing")
    ranks = [start(tmp_path, given, SLURM_PROCID=rank, XDG_RUNTIME_DIR=missing) for rank in ("0", "1")]
    lines = outputs(*ranks)
    assert [line.rpartition(" ")[0] for line in lines] == ["rank 0 of 2", "rank 1 of 2"], lines


def test_a_forked_child_that_exits_leaves_the_directory(tmp_path: pathlib.Path) -> None:
    given = ONE_HOST["torchrun"]
    lines = outputs(*(start(tmp_path, given, program=FORKING, RANK=rank) for rank in ("0", "1")))
    # That of the ranks, and that of the sidecar.
    assert lines == ["after the child 2"] * 2, lines


def test_one_process_too_few(tmp_path: pathlib.Path) -> None:
    given = {**ONE_HOST["torchrun"], "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "RONDE_START_TIMEOUT": "30"}
    for line in outputs(start(tmp_path, given), start(tmp_path, given, RANK="0")):
        assert line.startswith("TimedOutError start rank 2 of 3 did not come within 30 s, 2 did"), line


def test_ranks_that_disagree_on_the_size(tmp_path: pathlib.Path) -> None:
    given = ONE_HOST["torchrun"]
    lines = outputs(start(tmp_path, given, WORLD_SIZE="3", LOCAL_WORLD_SIZE="3"), start(tmp_path, given, RANK="0"))
    for line in lines:
        assert "settings the ranks disagree on the number of processes: rank 0 (process" in line, line


def test_two_jobs_of_one_name_on_one_host(tmp_path: pathlib.Path) -> None:
    """None of them hangs. Of two that meet at the same time one at most begins, and the others fail with the reason."""
    given = {**ONE_HOST["torchrun"], "RONDE_START_TIMEOUT": "10"}
    lines = outputs(*(start(tmp_path, given, RANK=rank) for rank in ("0", "0", "1", "1")))
    assert all(re.match(r"rank \d of 2 |\w+Error ", line) for line in lines), lines
    # Ranks that begin together are one of each number.
    begun: dict[str, list[str]] = {}
    for _, rank, *_, job in (line.split() for line in lines if line.startswith("rank")):
        begun.setdefault(job, []).append(rank)
    assert all(sorted(ranks) == ["0", "1"] for ranks in begun.values()), lines
    # Whoever meets the other job names its processes; others miss a rank that has met it. On a machine so busy that one
    # job has met before the other one comes, both begin.
    named = [line for line in lines if re.search(r"process \d+ on .* process \d+ on .*Two jobs have one name", line)]
    assert named or len(begun) == 2, lines
    assert all(line in named or re.match(r"TimedOutError start rank", line) for line in lines if "Error" in line), lines


def test_a_directory_that_others_can_enter(tmp_path: pathlib.Path, started: pytest.MonkeyPatch) -> None:
    for name, value in ONE_HOST["torchrun"].items():
        started.setenv(name, value)
    started.setattr(tempfile, "tempdir", str(tmp_path))
    started.delenv("XDG_RUNTIME_DIR", raising=False)
    launched = _ronde.LaunchedBy.detect(dict(os.environ))
    assert launched is not None
    directory = without_launcher._rendezvous_directory(launched)
    directory.mkdir()
    directory.chmod(0o755)
    with pytest.raises(ronde.RondeError, match="is not a directory of this user alone") as raised:
        without_launcher.settings_without_launcher({})
    assert str(directory) in str(raised.value)
    assert raised.value.cause == "settings"


def test_each_run_of_a_launcher_has_its_own_directory(started: pytest.MonkeyPatch) -> None:
    def directory(launcher: str, **changed: str) -> pathlib.Path:
        launched = _ronde.LaunchedBy.detect({**ONE_HOST[launcher], **changed})
        assert launched is not None
        return without_launcher._rendezvous_directory(launched)

    torchrun = directory("torchrun")
    assert directory("torchrun", RANK="0", LOCAL_RANK="0") == torchrun
    for changed in ({"TORCHELASTIC_RESTART_COUNT": "1"}, {"MASTER_PORT": "29501"}, {"TORCHELASTIC_RUN_ID": "y"}):
        assert directory("torchrun", **changed) != torchrun
    assert directory("srun", SLURM_STEP_ID="1") != directory("srun")
    assert directory("srun", SLURM_RESTART_COUNT="1") != directory("srun")
    assert directory("mpiexec.hydra", PMI_RANK="0") == directory("mpiexec.hydra")


@pytest.mark.parametrize("given", [{"RONDE_SOCKET": "/nowhere"}, {"RONDE_JOB": "night"}])
def test_a_job_of_ronde_takes_precedence(started: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    for name, value in {**SPREAD["torchrun"], **given}.items():
        started.setenv(name, value)
    assert without_launcher.settings_without_launcher({}) == {"rank": 1}
    assert without_launcher.settings_without_launcher({"socket": "/given", "rank": 0}) == {}
    started.setenv("RONDE_RANK", "1")
    assert without_launcher.settings_without_launcher({}) == {}


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
    kept = without_jobs()
    kept.update(
        RONDE_BIN=ronde_binary(),
        PYTHONPATH=f"{PACKAGE}{os.pathsep}{COMPAT}",
        PATH=os.pathsep.join([*map(str, path), os.environ["PATH"]]),
    )
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=kept, check=False)


def without_jobs() -> dict[str, str]:
    """Returns the environment without the launchers' and ronde's own variables."""
    names = r"RONDE_|HOROVOD_|OMPI_|PMI|SLURM_|XDG_RUNTIME_DIR|WORLD_SIZE|TORCHELASTIC_"
    return {name: value for name, value in os.environ.items() if not re.match(names, name)}


def beside_python(name: str) -> str:
    path = pathlib.Path(sys.executable).with_name(name)
    if not path.is_file():
        leave_out("mpi", f"there is no {name} beside this Python; `make setup` installs it")
    return str(path)


def mpich() -> str:
    """Returns MPICH's launcher, which has a separate environment."""
    # By the Python that the environments are made by, on whose packages their names depend.
    command = [getattr(sys, "_base_executable", sys.executable), str(ENVIRONMENTS), "path", "mpich"]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": ""})
    path = pathlib.Path(found.stdout.strip()).with_name("mpiexec")
    if not path.is_file():
        leave_out("mpi", "MPICH is not installed; `make setup` installs it")
    return str(path)


def ways(out: str, text: str) -> list[str]:
    """The ways to begin on whose line the text is."""
    lines = [line for line in out.splitlines() if re.match(r"(connect|init|horovod|group|url|variables): ", line)]
    return sorted(line.partition(":")[0] for line in lines if text in line)


ALL_BUT_CONNECT = sorted(["init", "horovod", "group", "url"] * 2)
ALL = sorted(["connect", "init", "horovod", "group", "url"] * 2)


def torchrun(processes: int) -> list[str]:
    """The command, with a port that is not that of another test's torchrun."""
    return [beside_python("torchrun"), "--nproc-per-node", str(processes), "--master-port", str(free_port())]


def test_torchrun(tmp_path: pathlib.Path) -> None:
    """All ways begin but `connect`, which takes a job that is there, and the group of plain `env://`."""
    script = tmp_path / "begin.py"
    script.write_text(BEGIN)
    done = run([*torchrun(2), str(script)])
    assert ways(done.stdout, "2 rank") == ALL_BUT_CONNECT, f"{done.stdout}\n{done.stderr}"
    text = "torchrun has started this process as one of 2 (WORLD_SIZE=2"
    assert ways(done.stdout, text) == ["connect"] * 2, f"{done.stdout}\n{done.stderr}"


def test_torchrun_starts_all_processes_again(tmp_path: pathlib.Path) -> None:
    """Rank 1 fails in the first round; the processes of the second one share a new sidecar."""
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    command = [*torchrun(2), "--max-restarts", "1", str(script)]
    done = run(command)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("round"))
    assert [line.rpartition(" ")[0] for line in lines] == [
        "round 0 rank 0 of 2: 2.0",
        "round 0 rank 1 of 2: 2.0",
        "round 1 rank 0 of 2: 2.0",
        "round 1 rank 1 of 2: 2.0",
    ]
    jobs = [line.rpartition(" ")[2] for line in lines]
    assert jobs[0] == jobs[1] != jobs[2] == jobs[3]


AGAIN = """
import os, sys
import torch
import ronde.torch as hvd
from ronde import without_launcher
hvd.init()
total = hvd.allreduce(torch.ones(1), op=hvd.Sum).item()
number, job = os.environ["TORCHELASTIC_RESTART_COUNT"], without_launcher._own.shared.job
os.write(1, f"round {number} rank {hvd.rank()} of {hvd.size()}: {total} {job}{os.linesep}".encode())
hvd.barrier()
if number == "0" and hvd.rank() == 1:
    os._exit(3)
if number == "0":
    hvd.barrier()
"""


def test_two_jobs_of_mpich_at_a_time() -> None:
    """They have no ID in their variables: each has its own launcher on the host."""
    command = [mpich(), "-n", "2", sys.executable, "-c", JOIN]
    environment = {**without_jobs(), "RONDE_BIN": ronde_binary(), "PYTHONPATH": str(PACKAGE)}
    jobs = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for text in outputs(*jobs):
        lines = sorted(text.splitlines())
        assert [line.rpartition(" ")[0] for line in lines] == ["rank 0 of 2", "rank 1 of 2"], text


def test_the_launcher_of_mpich() -> None:
    done = run([mpich(), "-n", "2", sys.executable, "-c", BEGIN])
    assert ways(done.stdout, "2 rank") == ALL_BUT_CONNECT, f"{done.stdout}\n{done.stderr}"
    text = "the mpiexec or mpirun of MPICH or Intel MPI has started this process as one of 2 (PMI_SIZE=2"
    assert ways(done.stdout, text) == ["connect"] * 2, f"{done.stdout}\n{done.stderr}"


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
    for command in ([*torchrun(1), "--no-python"], [mpich(), "-n", "1"]):
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
