"""Elastic jobs with wrong input: discovery scripts, other programs, states, a link that is cut."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import time
from typing import TYPE_CHECKING

import pytest
from conftest import leave_out, ronde_binary

pytest.importorskip("torch")
pytest.importorskip("cloudpickle")

from elastic_job import PATIENCE_S, ElasticJob, Hosts
from two_hosts import TwoHosts, ip, script, two_hosts

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def hosts(tmp_path: pathlib.Path) -> Hosts:
    return Hosts(tmp_path)


def program(folder: pathlib.Path, text: str) -> list[str]:
    """Writes a program. Returns the words that run it."""
    path = folder / "program.py"
    path.write_text(text)
    return [str(path)]


# === Discovery scripts ===

FAILS = [
    ("echo no cloud >&2; exit 3", r"exited with code 3.*\n.*\n.*no cloud"),
    ("echo who knows; echo 127.0.0.1:1", r"\"who knows\", is not host:slots"),
    ("echo 127.0.0.1:1; echo 127.0.0.1:2", r"printed host \"127.0.0.1\" twice"),
    ("sleep 600", r"did not end within \d+ s, so it was killed"),
]


@pytest.mark.parametrize(("text", "expected"), FAILS)
def test_a_script_that_fails_first_ends_the_job(hosts: Hosts, text: str, expected: str) -> None:
    hosts.runs(text)
    with ElasticJob(["--min-np", "1", "--host-discovery-script", str(hosts.script)], ["-c", "pass"]) as job:
        assert job.status() == 64, job.output
    assert re.search(expected, job.output), job.output
    assert "RONDE-E102" in job.output


STEPS = """
import os, sys, time, torch, ronde.torch as hvd
hvd.init()
state = hvd.elastic.TorchState(step=0)
worker = os.environ["RONDE_WORKER"]
print(f"worker {worker} (pid {os.getpid()}) begins as rank {hvd.rank()} of {hvd.size()}", flush=True)

@hvd.elastic.run
def train(state):
    is_over = False
    while not is_over:
        # Ranks end together, though the file may appear between their looks at it.
        is_seen = torch.tensor([float(os.path.exists(sys.argv[1]))])
        is_over = hvd.allreduce(is_seen, name="step", op=hvd.Max).item() > 0
        state.step += 1
        time.sleep(0.03)
        state.commit()

train(state)
print(f"rank {hvd.rank()} of {hvd.size()} has made some steps", flush=True)
"""


def test_a_script_that_fails_later_changes_nothing(hosts: Hosts, tmp_path: pathlib.Path) -> None:
    """The failure is printed once, and the hosts stay. Afterwards its answers count again."""
    hosts.set("127.0.0.1:1")
    stop = tmp_path / "stop"
    options = ["-np", "1", "--min-np", "1", "--host-discovery-script", str(hosts.script)]
    with ElasticJob(options, [*program(tmp_path, STEPS), str(stop)]) as job:
        job.await_size(1)
        for text, expected in FAILS:
            hosts.runs(text)
            job.await_text(expected)
        hosts.set("127.0.0.1:1", "127.0.0.2:1")
        hosts.runs(f"cat {hosts.file}")
        job.await_text(r"begins as rank 1 of 2")
        stop.touch()
        assert job.status() == 0, job.output
    assert job.output.count("its last answer is used until it has another one") == len(FAILS), job.output
    assert "restoring the last commit" not in job.output


# === Other programs ===

OTHER = """
import os, sys, time, torch, ronde.torch as hvd
hvd.init()
worker = os.environ["RONDE_WORKER"]
is_other = int(worker) >= 2
model = torch.nn.Linear(4, 2 if is_other and sys.argv[1] == "model" else 1)
further = {"scale": 1.0} if is_other and sys.argv[1] == "version" else {}
state = hvd.elastic.TorchState(model, step=0, **further)
print(f"worker {worker} (pid {os.getpid()}) begins as rank {hvd.rank()} of {hvd.size()}", flush=True)

@hvd.elastic.run
def train(state):
    is_over = False
    while not is_over:
        is_seen = torch.tensor([float(os.path.exists(sys.argv[2]))])
        is_over = hvd.allreduce(is_seen, name="step", op=hvd.Max).item() > 0
        state.step += 1
        time.sleep(0.03)
        state.commit()

train(state)
print(f"rank {hvd.rank()} has ended", flush=True)
"""


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("model", r"weight is float32\[2, 4\] here and float32\[1, 4\] on rank 0"),
        ("version", r"this worker has the attribute scale, rank 0 does not"),
    ],
)
def test_a_newcomer_with_another_program_is_an_error_of_its_own(
    tmp_path: pathlib.Path, kind: str, expected: str
) -> None:
    end = tmp_path / "end"
    with ElasticJob(["-np", "2", "--min-np", "1"], [*program(tmp_path, OTHER), kind, str(end)]) as job:
        job.kill(job.await_size(2, 1).pid)
        job.await_text(expected)
        end.touch()
        job.await_text(r"rank 0 has ended")
        assert job.status() == 0, job.output


# === States ===

NO_COMMIT = """
import os, signal, time, torch, ronde.torch as hvd
hvd.init()
state = hvd.elastic.TorchState(torch.nn.Linear(2, 2), step=0)

@hvd.elastic.run
def train(state):
    print(f"worker {os.environ['RONDE_WORKER']} trains from step {state.step}", flush=True)
    while state.step < 20:
        hvd.allreduce(torch.ones(1), name="step")
        state.step += 1
        if state.step == 10 and os.environ["RONDE_WORKER"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.03)

train(state)
print(f"rank {hvd.rank()} ends at step {state.step}", flush=True)
"""


def test_a_training_without_commits_restarts_with_a_warning(tmp_path: pathlib.Path) -> None:
    with ElasticJob(["-np", "2", "--min-np", "1"], program(tmp_path, NO_COMMIT)) as job:
        assert job.status() == 0, job.output
    assert "the state has no commit, so training restarts from its last synchronization" in job.output
    assert job.output.count("worker 0 trains from step 0") >= 2, job.output
    assert "rank 0 ends at step 20" in job.output


UNPICKLABLE = """
import torch, ronde.torch as hvd
hvd.init()
state = hvd.elastic.TorchState(rows=(number for number in range(3)))
hvd.elastic.run(lambda state: None)(state)
"""


def test_a_state_that_cannot_be_sent_ends_the_job(tmp_path: pathlib.Path) -> None:
    with ElasticJob(["-np", "2", "--min-np", "2"], program(tmp_path, UNPICKLABLE)) as job:
        assert job.status() != 0
    assert "the attribute rows of the state cannot be sent to other ranks" in job.output


# === Hosts ===


NOTED_STEPS = STEPS.replace(
    "        state.step += 1\n",
    "        state.step += 1\n        with open(sys.argv[2], 'a') as noted:\n"
    "            noted.write(f'{worker} {hvd.size()}\\n')\n",
)


SSHD = """
ListenAddress {address}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
PidFile none
PermitRootLogin yes
StrictModes no
UsePAM no
"""
CLIENT = """
IdentityFile {folder}/user
UserKnownHostsFile /dev/null
StrictHostKeyChecking no
LogLevel ERROR
"""


@contextlib.contextmanager
def reached_by_ssh(network: TwoHosts) -> Iterator[str]:
    """Runs an SSH server on the second host. Returns a folder with an `ssh` that logs in there, for PATH."""
    server, client = shutil.which("sshd") or "/usr/sbin/sshd", shutil.which("ssh")
    if client is None or not pathlib.Path(server).exists():
        leave_out("sshd", "there is no SSH server")
    folder = network.folder / "real"
    folder.mkdir()
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    (folder / "sshd_config").write_text(SSHD.format(address=network.addresses[1], folder=folder))
    (folder / "client").write_text(CLIENT.format(folder=folder))
    script(folder / "ssh", f'#!/bin/sh\nexec {client} -F {folder}/client "$@"\n')
    pathlib.Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen(network.on(1, [server, "-D", "-e", "-f", str(folder / "sshd_config")]))
    try:
        yield str(folder)
    finally:
        process.terminate()
        process.wait(20)


@pytest.mark.heavy
def test_of_two_halves_the_one_with_the_launcher_continues(tmp_path: pathlib.Path) -> None:
    """The other half does not train without it: its workers wait for a membership until the elastic timeout."""
    ronde_binary()
    with two_hosts() as network, reached_by_ssh(network) as folder:
        output = cut_in_two(network, folder, tmp_path)
    assert "cannot reach each other" not in output


def test_of_two_halves_that_the_launcher_reaches_the_one_of_rank_0_continues(tmp_path: pathlib.Path) -> None:
    """The network between the sidecars is cut, while the launcher reaches both: it ends the other half."""
    ronde_binary()
    with two_hosts() as network:
        output = cut_in_two(network, str(network.folder), tmp_path)
        first, second = network.addresses
    assert f"sidecar 1 on host {second} and sidecar 0 on host {first} cannot reach each other" in output, output
    assert "RONDE-E406" in output, output
    assert f"host {second} is left out for" in output, output


def cut_in_two(network: TwoHosts, ssh: str, folder: pathlib.Path) -> str:
    """Runs a job on two hosts, and cuts the network between them while it trains. The first half has to continue.

    ssh    -- the folder with the `ssh` by which the launcher reaches the second host
    folder -- for the files of the job

    Returns the output of the job.
    """
    stop, noted = folder / "stop", folder / "steps"
    within = network.on_first(["env", f"PATH={ssh}{os.pathsep}{os.environ['PATH']}", f"TMPDIR={network.folder}"])
    listed = ",".join(f"{address}:2" for address in network.addresses)
    variables = ["PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "OMP_NUM_THREADS"]
    options = ["-np", "4", "--min-np", "2", "-H", listed, *(word for name in variables for word in ("-x", name))]
    command = [*program(folder, NOTED_STEPS), str(stop), str(noted)]
    with ElasticJob([*options, "--elastic-timeout", "60"], command, within) as job:
        job.await_size(4)
        await_lines(noted, 20)
        ip("-n", network.names[1], "link", "set", "v0", "down")
        job.await_text(r"membership \d+: 2 ranks on 1 host")
        at = len(noted.read_text().splitlines())
        await_lines(noted, at + 20)
        stop.touch()
        assert job.status() == 0, job.output
    sizes = [line.split() for line in noted.read_text().splitlines()]
    after = next(index for index, (_, size) in enumerate(sizes) if size == "2")
    assert {size for _, size in sizes[after:]} == {"2"}, sizes[after:]
    assert {worker for worker, _ in sizes[after:]} == {"0", "1"}, sizes[after:]
    return job.output


def await_lines(path: pathlib.Path, count: int) -> None:
    """Waits until a file has so many lines."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() or len(path.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, f"{path} has not {count} lines"
        time.sleep(0.1)
