"""compose/yarn/worker: tasks as TonY starts them, with its variables. Each is a process on the loopback."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest
from conftest import ROOT, WORKER

SCRIPT = ROOT / "compose" / "yarn" / "worker"
TIMEOUT_S = 180
# Below the ports that the kernel gives to sockets that ask for any: one of those may be free now and taken before a
# sidecar binds it. Each process of tests has its own part.
PORTS_BEGIN, PORTS_OF_PROCESS, PROCESSES = 28_000, 1_000, 4
# A sidecar uses the ports after its own for its lanes.
PORTS_OF_SIDECAR = 20


def addresses(count: int) -> list[str]:
    """Addresses as TonY reserves them, whose ports nothing uses."""
    process = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % PROCESSES
    begin = PORTS_BEGIN + process * PORTS_OF_PROCESS
    firsts = range(begin, begin + PORTS_OF_PROCESS, PORTS_OF_SIDECAR)
    free = [first for first in firsts if all(is_free(first + index) for index in range(PORTS_OF_SIDECAR))]
    assert len(free) >= count, f"only {len(free)} groups of ports are free from {begin}"
    return [f"127.0.0.1:{first}" for first in free[:count]]


def is_free(port: int) -> bool:
    """Whether a port can be bound over TCP and over UDP. A sidecar uses both."""
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        try:
            tcp.bind(("127.0.0.1", port))
            udp.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@pytest.fixture
def secret(ronde: str, folder: pathlib.Path) -> pathlib.Path:
    path = folder / "job-secret"
    subprocess.run([ronde, "certs", "secret", str(path)], check=True, capture_output=True)
    return path


def started(
    ronde: str, task: tuple[str, int], spec: dict[str, list[str]], *command: str, **variables: str
) -> subprocess.Popen[str]:
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("RONDE_")},
        "RONDE": ronde,
        "RONDE_CONNECT_WITHIN": "90",
        "JOB_NAME": task[0],
        "TASK_INDEX": str(task[1]),
        "CLUSTER_SPEC": json.dumps(spec),
        "APP_ID": "application_1700000000000_0042",
        **variables,
    }
    pipe = subprocess.PIPE
    return subprocess.Popen([str(SCRIPT), *command], env=environment, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("kinds", [{"chief": 1, "worker": 2}, {"worker": 2}, {"worker": 1}])
def test_tasks_are_ranks_of_one_job(ronde: str, secret: pathlib.Path, kinds: dict[str, int]) -> None:
    given = iter(addresses(sum(kinds.values())))
    spec = {kind: [next(given) for _ in range(count)] for kind, count in kinds.items()}
    spec["tensorboard"] = ["127.0.0.1:1"]
    tasks = [(kind, index) for kind, count in kinds.items() for index in range(count)]
    train = (sys.executable, str(WORKER))
    running = [started(ronde, task, spec, *train, RONDE_JOB_SECRET_FILE=str(secret)) for task in tasks]
    seen = []
    for process in running:
        out, error = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, error
        seen.append(json.loads(out))
    size = len(tasks)
    assert [(each["rank"], each["size"], each["local_rank"]) for each in seen] == [
        (rank, size, 0) for rank in range(size)
    ]


def test_a_task_that_fails_ends_with_its_status(ronde: str, secret: pathlib.Path) -> None:
    spec = {"worker": addresses(2)}
    train = (sys.executable, str(WORKER), "--fail-rank", "1")
    running = [started(ronde, ("worker", index), spec, *train, RONDE_JOB_SECRET_FILE=str(secret)) for index in range(2)]
    statuses = []
    for process in running:
        _, error = process.communicate(timeout=TIMEOUT_S)
        statuses.append((process.returncode, error))
    assert statuses[1][0] == 7
    assert statuses[0][0] not in (0, 7)
    assert "rank 1" in statuses[0][1]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"CLUSTER_SPEC": ""}, "this is no task of TonY"),
        ({"RONDE_JOB_SECRET_FILE": ""}, "RONDE_JOB_SECRET_FILE is not set"),
        ({"RONDE_JOB_SECRET_FILE": "/no/such/file"}, "/no/such/file does not exist"),
        ({"CLUSTER_SPEC": "{"}, "CLUSTER_SPEC cannot be read"),
        ({"TASK_INDEX": "5"}, "worker 5 is not among the 1 tasks"),
    ],
)
def test_mistakes_are_named(ronde: str, secret: pathlib.Path, changed: dict[str, str], words: str) -> None:
    variables = {"RONDE_JOB_SECRET_FILE": str(secret), **changed}
    process = started(ronde, ("worker", 0), {"worker": ["127.0.0.1:7400"]}, "true", **variables)
    _, error = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert words in error
