"""compose/slurm/train.sbatch trains on two nodes: network namespaces on which a stub of srun starts tasks."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import pytest
from conftest import ROOT, WORKER, results
from hosts import Hosts, run

sys.path.append(str(ROOT / "sdk-python" / "tests"))

from installed_wheel import describe_wheel

SCRIPT = ROOT / "compose" / "slurm" / "train.sbatch"
STUBS = pathlib.Path(__file__).with_name("stubs")
TRAIN = [sys.executable, str(WORKER)]
# Of a whole job, and of one step of it: beside other tests a process may take ten seconds to start.
TRAINING_TIMEOUT_S = 180
PATIENCE_S = 120
MakeHosts = Callable[[Sequence[Sequence[str]]], Hosts]


@dataclasses.dataclass
class Allocation:
    """Two nodes and the batch shell on the first of them."""

    folder: pathlib.Path
    environment: dict[str, str]

    def sbatch(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return run(["bash", str(SCRIPT), *command], TRAINING_TIMEOUT_S, env=self.environment)

    def calls(self) -> list[list[str]]:
        """The arguments of each call of srun."""
        log = self.folder / "srun.log"
        return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    def left(self) -> list[str]:
        """The files that remain in the shared directory and in those of the nodes; flight records remain on purpose."""
        places = [self.folder / "shared", self.folder / "tmp-alpha", self.folder / "tmp-beta"]
        found = [str(path) for place in places if place.exists() for path in place.rglob("*")]
        return [path for path in found if "/ronde.flight-" not in path]


@pytest.fixture
def allocation(make_hosts: MakeHosts, folder: pathlib.Path, ronde: str) -> Allocation:
    hosts = make_hosts([["alpha"], ["beta"]])
    nodes = []
    for number, name in enumerate(["alpha", "beta"]):
        own = folder / f"tmp-{name}"
        own.mkdir()
        nodes.append({"name": name, "enter": hosts.on(number, []), "folder": str(own)})
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "RONDE_"))}
    environment |= {
        "PATH": f"{STUBS}:{os.environ['PATH']}",
        "HOME": str(folder),
        "RONDE": ronde,
        "RONDE_SHARED": str(folder / "shared"),
        "RONDE_CONNECT_WITHIN": str(PATIENCE_S),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "alpha,beta",
        "SLURM_TASKS_PER_NODE": "2(x2)",
        "STUB_NODES": json.dumps(nodes),
        "STUB_LOG": str(folder / "srun.log"),
    }
    return Allocation(folder, environment)


def test_the_script_is_clean(tools: pathlib.Path) -> None:
    scripts = [SCRIPT, ROOT / "compose" / "slurm" / "remote-shell"]
    for script in scripts:
        assert run(["bash", "-n", str(script)], PATIENCE_S).returncode == 0
        checked = run([str(tools / "shellcheck"), str(script)], PATIENCE_S)
        assert checked.returncode == 0, checked.stdout


def test_two_nodes_train(allocation: Allocation) -> None:
    done = allocation.sbatch(TRAIN)
    assert done.returncode == 0, done.stderr
    found = results(done.stdout)
    assert [(result["rank"], result["size"], result["local_rank"]) for result in found] == [
        (0, 4, 0),
        (1, 4, 1),
        (2, 4, 0),
        (3, 4, 1),
    ]
    calls = allocation.calls()
    assert len(calls) == 2
    assert all("--kill-on-bad-exit=0" in call and "--overlap" in call for call in calls)
    assert allocation.left() == [], "the secret or sockets remain"


def test_a_program_that_only_names_the_backend_trains(allocation: Allocation) -> None:
    """The tasks have neither RANK nor WORLD_SIZE; PyTorch finds the name by the wheel's entry points."""
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    paths = [ROOT / "sdk-python" / "python", describe_wheel(allocation.folder)]
    allocation.environment |= {"PYTHONPATH": ":".join(map(str, paths)), "SLURM_TASKS_PER_NODE": "1(x2)"}
    program = ROOT / "sdk-python" / "examples" / "ddp_digits.py"
    done = run(["bash", str(SCRIPT), sys.executable, str(program)], TRAINING_TIMEOUT_S, env=allocation.environment)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"rank (\d) of 2: test accuracy [\d.]+, weights ([0-9a-f]+)", done.stdout)
    assert sorted(rank for rank, _ in found) == ["0", "1"], done.stdout
    assert len({weights for _, weights in found}) == 1, "the ranks did not train together"


def test_nodes_may_have_different_numbers_of_tasks(allocation: Allocation) -> None:
    allocation.environment["SLURM_TASKS_PER_NODE"] = "2,1"
    done = allocation.sbatch(TRAIN)
    assert done.returncode == 0, done.stderr
    assert [(result["rank"], result["local_rank"]) for result in results(done.stdout)] == [(0, 0), (1, 1), (2, 0)]


def test_a_failed_worker_is_named_by_all_others(allocation: Allocation) -> None:
    done = allocation.sbatch([*TRAIN, "--fail-rank", "2"])
    assert done.returncode == 7, done.stderr
    assert done.stderr.count("rank 2") >= 3, done.stderr
    assert allocation.left() == []


@pytest.mark.heavy
def test_a_sidecar_with_another_secret_is_rejected(allocation: Allocation, ronde: str) -> None:
    other = allocation.folder / "other"
    other.mkdir(mode=0o700)
    assert run([ronde, "certs", "secret", str(other / "job-secret")], PATIENCE_S).returncode == 0
    nodes = json.loads(allocation.environment["STUB_NODES"])
    nodes[1]["environment"] = {"RONDE_PRIVATE": str(other)}
    allocation.environment |= {"STUB_NODES": json.dumps(nodes), "RONDE_CONNECT_WITHIN": "30"}
    done = allocation.sbatch(TRAIN)
    assert done.returncode != 0
    assert results(done.stdout) == [], "ranks trained although the sidecars do not trust each other"
    assert "not signed by an authority of this job" in done.stderr, done.stderr


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o770])
def test_a_shared_directory_that_others_may_use_is_refused(mode: int, allocation: Allocation) -> None:
    shared = allocation.folder / "shared"
    shared.mkdir()
    shared.chmod(mode)
    done = allocation.sbatch(TRAIN)
    assert done.returncode == 1
    assert f"has mode {mode:o}, others may use it; run: chmod 700 {shared}" in done.stderr
    assert allocation.calls() == []
    assert allocation.left() == []


def test_a_shared_directory_of_another_user_is_refused(allocation: Allocation) -> None:
    shared = allocation.folder / "shared"
    shared.mkdir(mode=0o700)
    os.chown(shared, 65534, -1)
    done = allocation.sbatch(TRAIN)
    assert done.returncode == 1
    assert "name a directory of your own with RONDE_SHARED" in done.stderr
    assert allocation.calls() == []


# As another user: takes the place of the sockets on a node, before the job begins.
IMPOSTOR = """
import os, pathlib, socket, sys
sockets, user = pathlib.Path(sys.argv[1]), int(sys.argv[2])
os.setgid(user)
os.setuid(user)
sockets.mkdir()
listener = socket.socket(socket.AF_UNIX)
listener.bind(str(sockets / "rpc.sock"))
listener.listen()
for rank in range(4):
    (sockets / f"rank-{rank}.token").write_bytes(bytes(32))
print("listening", flush=True)
while listener.accept()[0].recv(1):
    print("a worker has sent something", flush=True)
"""


def test_workers_send_nothing_to_a_sidecar_of_another_user(allocation: Allocation) -> None:
    nobody, folder = 65_534, allocation.folder / "tmp-beta"
    folder.chmod(0o777)
    # The workers of the other node wait this long, as their sidecar lacks a peer.
    allocation.environment["RONDE_CONNECT_WITHIN"] = "5"
    command = [sys.executable, "-c", IMPOSTOR, str(folder / f"ronde-{os.getuid()}-4711"), str(nobody)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as impostor:
        try:
            assert impostor.stdout is not None
            assert impostor.stdout.readline() == "listening\n"
            done = allocation.sbatch(TRAIN)
        finally:
            impostor.kill()
        received = impostor.stdout.read()
    assert done.returncode != 0
    assert f"is user {nobody}'s, and this worker accepts user {os.getuid()}'s only" in done.stderr, done.stderr
    assert received == ""


@pytest.mark.heavy
def test_a_program_that_never_joins_ends_the_job_in_bounded_time(allocation: Allocation) -> None:
    allocation.environment["RONDE_CONNECT_WITHIN"] = "3"
    done = allocation.sbatch(["true"])
    assert done.returncode != 0, "the sidecars waited for workers that never came, and nobody noticed"
    assert "they are ended" not in done.stderr, "the sidecars did not end by themselves within 30 s of the workers' end"


def test_a_signal_ends_everything_and_removes_the_secret(allocation: Allocation) -> None:
    command = ["bash", str(SCRIPT), "sleep", "600"]
    batch = subprocess.Popen(command, env=allocation.environment, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + PATIENCE_S
    while not list(allocation.folder.glob("tmp-*/*/rpc.sock")):
        assert time.monotonic() < deadline
        assert batch.poll() is None
        time.sleep(0.1)
    assert next(iter(allocation.folder.glob("shared/*/job-secret"))).stat().st_mode & 0o777 == 0o600
    os.killpg(batch.pid, signal.SIGTERM)
    batch.communicate(timeout=PATIENCE_S)
    assert batch.returncode == 143
    # The signal has ended the stub of srun, too, so the batch script did not wait for the shells on the nodes.
    deadline = time.monotonic() + PATIENCE_S
    while allocation.left() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert allocation.left() == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_JOB_ID": ""}, "start it with: sbatch train.sbatch"),
        ({"SLURM_TASKS_PER_NODE": "2"}, "there are 2 nodes, but SLURM_TASKS_PER_NODE describes 1"),
        ({"SLURM_TASKS_PER_NODE": "two"}, "cannot be parsed"),
    ],
)
def test_a_wrong_environment_is_explained(changes: dict[str, str], words: str, allocation: Allocation) -> None:
    allocation.environment |= changes
    done = allocation.sbatch(TRAIN)
    assert done.returncode == 1
    assert words in done.stderr
    assert allocation.calls() == []
    assert allocation.left() == []


def test_the_launcher_starts_the_job_by_srun(allocation: Allocation, ronde: str) -> None:
    """Without a secret on a disk: certificates travel over the pipes of srun."""
    nodes = json.loads(allocation.environment["STUB_NODES"])
    shell = ROOT / "compose" / "slurm" / "remote-shell"
    job = [ronde, "run", "-np", "4", "-H", "alpha:2,beta:2", "--remote-shell", str(shell), *TRAIN]
    done = run([*nodes[0]["enter"], *job], TRAINING_TIMEOUT_S, env=allocation.environment)
    assert done.returncode == 0, done.stderr
    lines = "\n".join(line.split(":", 1)[1] for line in done.stdout.splitlines())
    assert [(result["rank"], result["local_rank"]) for result in results(lines)] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert [call[call.index("bash") - 1] for call in allocation.calls()] == ["--nodelist=beta"]
    assert allocation.left() == []
