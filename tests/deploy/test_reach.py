"""The elastic profile of Compose, and its remote shell, which runs here without containers."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ROOT

REACH = ROOT / "compose" / "image" / "reach.py"
PATIENCE_S = 120


@contextlib.contextmanager
def served(folder: pathlib.Path, name: str, ronde: str) -> Iterator[subprocess.Popen[str]]:
    """A container that plays a host."""
    path = folder / f"{name}.sock"
    environment = {**os.environ, "RONDE_BIN": ronde}
    command = [sys.executable, str(REACH), "serve", str(folder), "--name", name]
    with subprocess.Popen(command, env=environment, text=True) as host:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not path.exists():
                assert host.poll() is None, f"{name} has ended"
                assert time.monotonic() < deadline, f"{name} does not serve"
                time.sleep(0.02)
            yield host
        finally:
            host.kill()


def launch(folder: pathlib.Path, ronde: str, *options: str, command: str) -> subprocess.Popen[str]:
    reach = f"{sys.executable} {REACH}"
    own = [f"--host-discovery-script={reach} hosts {folder} 1", f"--remote-shell={reach} call {folder}"]
    words = [ronde, "run", *options, *own, "--network-interfaces=lo", "sh", "-c", command]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(job: subprocess.Popen[str]) -> str:
    try:
        output, _ = job.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        job.kill()
        output, _ = job.communicate()
        pytest.fail(f"the job has not ended within {PATIENCE_S} s\n{output}")
    return output


def test_a_job_runs_on_hosts_that_are_reached_over_sockets(folder: pathlib.Path, ronde: str) -> None:
    with served(folder, "host-0", ronde), served(folder, "host-1", ronde):
        job = launch(folder, ronde, "--min-np=2", command="echo worker $RONDE_WORKER on $HOROVOD_HOSTNAME")
        output = finish(job)
    assert job.returncode == 0, output
    for worker in range(2):
        assert f"worker {worker} on host-{worker}" in output, output


def test_a_host_that_is_stopped_gives_notice(folder: pathlib.Path, ronde: str) -> None:
    """As by `docker stop`: the agent gets SIGTERM, and the container ends with it."""
    flag = folder / "go"
    command = f"echo up $RONDE_WORKER; while ! test -e {flag}; do sleep 0.1; done"
    with served(folder, "host-0", ronde) as host, served(folder, "host-1", ronde):
        job = launch(folder, ronde, "--min-np=1", "-np=2", "--preemption-notice=3", command=command)
        assert job.stdout is not None
        seen: list[str] = []
        await_line(job, seen, "up 0", "up 1")
        host.send_signal(signal.SIGTERM)
        await_line(job, seen, "host host-0 got SIGTERM")
        assert host.wait(PATIENCE_S) == 0
        flag.touch()
        seen.append(finish(job))
    assert not (folder / "host-0.sock").exists(), "it is not listed any more"


def await_line(job: subprocess.Popen[str], seen: list[str], *texts: str) -> None:
    """Reads the output up to all of these texts, for a bounded time."""
    assert job.stdout is not None
    deadline = time.monotonic() + PATIENCE_S
    while not all(text in "".join(seen) for text in texts):
        ready, _, _ = select.select([job.stdout], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"no {texts} within {PATIENCE_S} s\n{''.join(seen)}"
        # Not by the file object, which reads ahead: `select` would not see those lines.
        part = os.read(job.stdout.fileno(), 65_536)
        assert part, f"the job has ended\n{''.join(seen)}"
        seen.append(part.decode(errors="replace"))


def test_a_host_that_does_not_serve_is_reported(folder: pathlib.Path) -> None:
    called = subprocess.run(
        [sys.executable, str(REACH), "call", str(folder), "gone", "ronde agent"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert called.returncode == 255
    assert called.stderr == "cannot reach gone: No such file or directory\n"


@pytest.fixture(scope="module")
def services(tools: pathlib.Path) -> dict[str, Any]:
    """The services of compose.yaml."""
    program = "import json, sys, yaml; print(json.dumps(yaml.safe_load(sys.stdin)))"
    text = (ROOT / "compose" / "compose.yaml").read_text()
    read = subprocess.run([tools / "python", "-c", program], input=text, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(read.stdout)["services"]
    return found


def test_the_profile_has_a_launcher_and_hosts_that_come_back(services: dict[str, Any]) -> None:
    elastic = {name: each for name, each in services.items() if each.get("profiles") == ["elastic"]}
    assert sorted(elastic) == ["elastic", "host-0", "host-1", "host-2"]
    for name, each in elastic.items():
        assert (each["read_only"], each["cap_drop"]) == (True, ["ALL"]), name
        assert (each["networks"], each["volumes"]) == (["elastic"], ["hosts:/hosts"]), name
        if name != "elastic":
            assert (each["restart"], each["hostname"]) == ("unless-stopped", name)
            assert each["command"] == ["python", "reach.py", "serve", "/hosts"]
    assert elastic["elastic"]["restart"] == "no", "its end is the job's"
    assert sorted(elastic["elastic"]["depends_on"]) == ["host-0", "host-1", "host-2"]


def test_no_other_service_needs_the_profile(services: dict[str, Any]) -> None:
    others = {name: each for name, each in services.items() if each.get("profiles") != ["elastic"]}
    for name, each in others.items():
        assert not set(each.get("depends_on", {})) & {"elastic", "host-0", "host-1", "host-2"}, name


def test_the_launchers_command_line_is_valid(services: dict[str, Any], ronde: str, folder: pathlib.Path) -> None:
    """It ends for want of hosts, not because of its options."""
    reach = f"{sys.executable} {REACH}"
    words = [str(word) for word in services["elastic"]["command"]]
    words = [word.replace("python reach.py", reach).replace("/hosts", str(folder)) for word in words]
    words[:2] = [ronde, "run", "--elastic-timeout=1"]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 69, ended
    assert "the job needs 1 slots, and there are 0 after waiting 1 s" in ended.stderr, ended
