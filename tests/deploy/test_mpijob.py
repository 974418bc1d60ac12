"""Trains with the MPIJob: a launcher that logs in to two workers over ssh, as the MPI Operator sets them up."""

from __future__ import annotations

import contextlib
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from conftest import ROOT, WORKER, Rendered, leave_out, results
from containers import PATIENCE_S, Pod
from hosts import Hosts, run

JOB = "digits"
NAMES = [f"{JOB}-launcher", f"{JOB}-worker-0.{JOB}.default.svc", f"{JOB}-worker-1.{JOB}.default.svc"]
# The keys of the operator's Secret, and what its files are called in each pod.
ITEMS = {"ssh-privatekey": ["id_rsa"], "ssh-publickey": ["id_rsa.pub", "authorized_keys"]}


class MpiJob:
    """A launcher and two workers."""

    def __init__(self, pods: list[Pod]) -> None:
        self.launcher, *self.workers = pods

    def start_workers(self) -> None:
        """Until sshd answers everywhere: the operator waits for their readiness probes."""
        for worker in self.workers:
            (container,) = worker.spec["containers"]
            worker.start(container)
        for worker in self.workers:
            deadline = time.monotonic() + PATIENCE_S
            probe = "import socket, sys; socket.create_connection((sys.argv[1], 2222), 5)"
            on = self.launcher.hosts.on(0, [sys.executable, "-c", probe, self.launcher.hosts.address(worker.host)])
            while run(on, PATIENCE_S).returncode:
                assert time.monotonic() < deadline
                assert worker.running["worker"].poll() is None, worker.running["worker"].communicate()[0]
                time.sleep(0.1)

    def train(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs the launcher with a program of the test's."""
        (container,) = self.launcher.spec["containers"]
        # This machine has no /etc/mpi where the operator's file could be.
        words = [word.replace("/etc/mpi/hostfile", "/tmp/hostfile") for word in container["command"]]
        command = self.launcher.command(container, [*words, sys.executable, str(WORKER), *arguments])
        return run(command, 2 * PATIENCE_S, env={})


@pytest.fixture
def mpi_job(
    make_hosts: Callable[[Sequence[Sequence[str]]], Hosts], folder: pathlib.Path, ronde: str, rendered: Rendered
) -> Iterator[MpiJob]:
    for program in ["ssh", "/usr/sbin/sshd"]:
        if shutil.which(program) is None:
            leave_out("ssh", f"{program} is not installed")
    hosts = make_hosts([[name] for name in NAMES])
    (job,) = rendered.read(ROOT / "compose" / "kubernetes" / "mpijob.yaml")["MPIJob"]
    run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", str(folder / "key")], 20)
    keys = {"ssh-privatekey": (folder / "key").read_bytes(), "ssh-publickey": (folder / "key.pub").read_bytes()}
    (folder / "passwd").write_text("root:x:0:0::/root:/bin/sh\nmpiuser:x:1000:1000::/home/mpiuser:/bin/sh\n")
    pods = []
    for number, kind in enumerate(["Launcher", "Worker", "Worker"]):
        spec = job["spec"]["mpiReplicaSpecs"][kind]["template"]["spec"]
        pod = Pod(hosts, number, with_ssh(spec, job), {}, folder / f"pod-{number}", {"digits-ssh": keys})
        pod.image_files.append((str(folder / "passwd"), "/etc/passwd", ""))
        pods.append(pod)
    slots = job["spec"]["slotsPerWorker"]
    (folder / "pod-0" / "scratch" / "hostfile").write_text("".join(f"{name} slots={slots}\n" for name in NAMES[1:]))
    yield MpiJob(pods)
    for pod in pods:
        with contextlib.suppress(OSError):
            pod.kill()


def with_ssh(spec: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    """The pod with what the operator adds: the Secret for ssh, mounted into the first container."""
    items = [{"key": key, "path": path} for key, paths in ITEMS.items() for path in paths]
    volume = {"name": "ssh-auth", "secret": {"secretName": "digits-ssh", "items": items, "defaultMode": 0o644}}
    mount = {"name": "ssh-auth", "mountPath": job["spec"]["sshAuthMountPath"]}
    (container,) = spec["containers"]
    container = {**container, "volumeMounts": [*container["volumeMounts"], mount]}
    return {**spec, "volumes": [*spec["volumes"], volume], "containers": [container]}


def test_an_mpijob_trains(mpi_job: MpiJob) -> None:
    mpi_job.start_workers()
    done = mpi_job.train()
    assert done.returncode == 0, done.stderr + done.stdout
    found = results(re.sub(r"(?m)^\[\d+\]<stdout>:", "", done.stdout))
    assert [(result["rank"], result["local_rank"], result["uid"]) for result in found] == [
        (0, 0, 1000),
        (1, 1, 1000),
        (2, 0, 1000),
        (3, 1, 1000),
    ]


@pytest.mark.heavy
def test_a_lost_worker_ends_the_job(mpi_job: MpiJob) -> None:
    mpi_job.start_workers()
    done = mpi_job.train("--fail-rank", "3")
    assert done.returncode != 0
    assert "rank 3" in done.stderr + done.stdout


def test_a_host_without_the_key_of_the_job_gets_no_certificate(mpi_job: MpiJob, folder: pathlib.Path) -> None:
    """An impostor at the address of a worker."""
    run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-f", str(folder / "other")], 20)
    impostor = mpi_job.workers[1]
    impostor.write_secret(impostor.folder / "ssh-auth", {"id_rsa": (folder / "other").read_bytes()}, 0o644)
    mpi_job.start_workers()
    done = mpi_job.train()
    assert done.returncode != 0
    assert "RONDE-E215" in done.stderr, done.stderr
    assert results(re.sub(r"(?m)^\[\d+\]<stdout>:", "", done.stdout)) == []
