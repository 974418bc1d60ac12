"""Horovod's names in the images, and a job on the containers of two hosts by ssh, as docs/DEPLOYMENT.md says."""

from __future__ import annotations

import pathlib
import re
import time
import uuid
from collections.abc import Iterator

import pytest
from conftest import MPI, WORKER, Build
from engine import Engine
from project import PATIENCE_S, ROOT

FRAMEWORKS = "ronde-test-frameworks"
ALONE = ["run", "--rm", "--network", "none", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL"]
JOB_S = 300
WITH_PYTORCH = """
import torch
import horovod.torch as hvd
hvd.init()
print("rank", hvd.rank(), "of", hvd.size(), "sum", hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist(), flush=True)
"""
WITHOUT_FRAMEWORKS = """
import horovod, numpy, ronde
with ronde.connect() as client:
    found = client.allreduce(numpy.ones(1, "float32"), op=ronde.Sum, name="ones").tolist()
    print("rank", client.rank, "of", client.size, "sum", found, flush=True)
"""
SSH = "/home/mpiuser/.ssh"
MAKE_KEYS = f"""
cd {SSH}
ssh-keygen -q -t ed25519 -N "" -f id_ed25519
cp id_ed25519.pub authorized_keys
for host in alpha beta; do echo "[$host]:12345 $(cat id_ed25519.pub)"; done >known_hosts
chown -R 1000:1000 .
"""
SSHD = f"/usr/sbin/sshd -De -f/dev/null -p12345 -oHostKey={SSH}/id_ed25519 -oPidFile=none -oUsePAM=no -oStrictModes=no"
SSHD += " -oPasswordAuthentication=no -oKbdInteractiveAuthentication=no"


@pytest.mark.parametrize("tag", [WORKER, MPI])
def test_images_have_horovods_names(images: dict[str, int], docker: Engine, tag: str) -> None:
    """The command and the import, in a job that they start."""
    built = docker.run(*ALONE, tag, "horovodrun", "--check-build")
    assert "[X] PyTorch" in built, built
    assert_two_ranks(docker, tag, WITH_PYTORCH)


def test_horovodrun_starts_a_job_in_the_image_of_frameworks(docker: Engine, build: Build) -> None:
    """Without frameworks, which are gigabytes."""
    build("frameworks", FRAMEWORKS, "--build-arg", "RONDE_FRAMEWORKS=")
    assert "[X] ronde" in docker.run(*ALONE, FRAMEWORKS, "horovodrun", "--check-build")
    assert_two_ranks(docker, FRAMEWORKS, WITHOUT_FRAMEWORKS)


def assert_two_ranks(docker: Engine, tag: str, program: str) -> None:
    """Two ranks of one container reduce a tensor."""
    command = ["horovodrun", "-np", "2", "-H", "localhost:2", "python", "-c", program]
    found = docker.run(*ALONE, tag, *command, timeout_s=JOB_S)
    for rank in range(2):
        assert f"rank {rank} of 2 sum [2.0]" in found, found


@pytest.fixture
def network(docker: Engine) -> Iterator[str]:
    """A network without a way out, on which containers find each other by name."""
    name = f"ronde-ssh-{uuid.uuid4().hex[:8]}"
    docker.run("network", "create", "--internal", name)
    yield name
    docker.run("network", "rm", name)


@pytest.fixture
def beta(docker: Engine, images: dict[str, int], network: str, tmp_path: pathlib.Path) -> Iterator[list[str]]:
    """The container of a host, in which sshd listens; returns the engine's options for that of another host."""
    keys = ["-v", f"{tmp_path}:{SSH}"]
    docker.run("run", "--rm", "--network", "none", "--user", "root", *keys, MPI, "sh", "-euc", MAKE_KEYS)
    joined = ["--network", network, "-v", f"{tmp_path}:{SSH}:ro"]
    name = f"{network}-beta"
    named = ["--name", name, "--hostname", "beta", "--network-alias", "beta"]
    docker.run("run", "--detach", *joined, *named, MPI, *SSHD.split())
    try:
        deadline = time.monotonic() + PATIENCE_S
        while "Server listening" not in (printed := docker.run("logs", name)):
            assert time.monotonic() < deadline, printed
            time.sleep(0.2)
        yield [*joined, "--hostname", "alpha", "--network-alias", "alpha"]
    finally:
        docker.run("rm", "--force", name)


def test_containers_of_two_hosts_form_a_job_by_ssh(docker: Engine, beta: list[str]) -> None:
    """With the port that all of them share."""
    command = ["horovodrun", "-np", "2", "-H", "alpha:1,beta:1", "-p", "12345", "python", "-c", WITH_PYTORCH]
    found = docker.run("run", "--rm", *beta, MPI, *command, timeout_s=JOB_S)
    for rank in range(2):
        assert f"rank {rank} of 2 sum [2.0]" in found, found


def test_the_page_has_these_commands() -> None:
    """Those for the keys and for sshd."""
    page = re.sub(r"\s*\\?\n\s*", " ", (ROOT / "docs" / "DEPLOYMENT.md").read_text())
    assert SSHD in page
    assert re.sub(r"\s*\n\s*", " ", MAKE_KEYS.strip()) in page
