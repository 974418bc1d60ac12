"""Horovod's names in the images, and a job on the containers of two hosts by ssh, as docs/DEPLOYMENT.md says."""

from __future__ import annotations

import contextlib
import pathlib
import re
import time
import uuid
from collections.abc import Iterator
from typing import cast

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


@pytest.mark.parametrize("tag", [WORKER, MPI])
def test_examples_are_where_horovods_images_have_them(images: dict[str, int], docker: Engine, tag: str) -> None:
    assert "train_digits.py" in docker.run(*ALONE, tag, "ls", "/examples/")


def test_horovodrun_starts_a_job_in_the_image_of_frameworks(docker: Engine, build: Build) -> None:
    """Without frameworks, which are gigabytes."""
    build("frameworks", FRAMEWORKS, "--build-arg", "RONDE_FRAMEWORKS=")
    assert "[X] ronde" in docker.run(*ALONE, FRAMEWORKS, "horovodrun", "--check-build")
    assert "train_digits.py" in docker.run(*ALONE, FRAMEWORKS, "ls", "/examples/")
    assert_two_ranks(docker, FRAMEWORKS, WITHOUT_FRAMEWORKS)


def assert_two_ranks(docker: Engine, tag: str, program: str) -> None:
    """Two ranks of one container reduce a tensor."""
    command = ["horovodrun", "-np", "2", "-H", "localhost:2", "python", "-c", program]
    found = docker.run(*ALONE, tag, *command, timeout_s=JOB_S)
    for rank in range(2):
        assert f"rank {rank} of 2 sum [2.0]" in found, found


@contextlib.contextmanager
def network_of_hosts(docker: Engine) -> Iterator[str]:
    """A network without a way out, on which containers find each other by name. Then removes it, with both of them."""
    name = f"ronde-ssh-{uuid.uuid4().hex[:8]}"
    docker.run("network", "create", "--internal", name)
    try:
        yield name
    finally:
        try:
            # Also one that was made and has not started; the engine passes over one that was not made.
            docker.run("rm", "--force", f"{name}-alpha", f"{name}-beta")
        finally:
            docker.run("network", "rm", name)


def joined(network: str, host: str, keys: pathlib.Path) -> list[str]:
    """The engine's options for the container of a host."""
    named = ["--name", f"{network}-{host}", "--hostname", host, "--network-alias", host]
    return ["--network", network, *named, "-v", f"{keys}:{SSH}:ro"]


@pytest.fixture
def network(docker: Engine) -> Iterator[str]:
    """The network of alpha and beta."""
    with network_of_hosts(docker) as name:
        yield name


@pytest.fixture
def keys(docker: Engine, images: dict[str, int], tmp_path: pathlib.Path) -> pathlib.Path:
    """The folder with the job's keys."""
    mounted = ["-v", f"{tmp_path}:{SSH}"]
    docker.run("run", "--rm", "--network", "none", "--user", "root", *mounted, MPI, "sh", "-euc", MAKE_KEYS)
    return tmp_path


def test_containers_of_two_hosts_form_a_job_by_ssh(docker: Engine, network: str, keys: pathlib.Path) -> None:
    """With the port that all of them share."""
    docker.run("run", "--detach", *joined(network, "beta", keys), MPI, *SSHD.split())
    deadline = time.monotonic() + PATIENCE_S
    while "Server listening" not in (printed := docker.run("logs", f"{network}-beta")):
        assert time.monotonic() < deadline, printed
        time.sleep(0.2)
    command = ["horovodrun", "-np", "2", "-H", "alpha:1,beta:1", "-p", "12345", "python", "-c", WITH_PYTORCH]
    found = docker.run("run", "--rm", *joined(network, "alpha", keys), MPI, *command, timeout_s=JOB_S)
    for rank in range(2):
        assert f"rank {rank} of 2 sum [2.0]" in found, found


class Refusing:
    """An engine that makes a container and cannot start it."""

    def __init__(self) -> None:
        self.ran: list[tuple[str, ...]] = []

    def run(self, *words: str) -> str:
        """Writes down the command."""
        self.ran.append(words)
        if words[0] == "run":
            raise RuntimeError("it does not start")
        return ""


def test_a_container_that_does_not_start_is_removed_before_its_network(tmp_path: pathlib.Path) -> None:
    engine = Refusing()
    with pytest.raises(RuntimeError, match="does not start"), network_of_hosts(cast("Engine", engine)) as name:
        engine.run("run", "--detach", *joined(name, "beta", tmp_path), MPI)
    assert f"{name}-beta" in engine.ran[1]
    assert engine.ran[2:] == [("rm", "--force", f"{name}-alpha", f"{name}-beta"), ("network", "rm", name)]


def test_the_page_has_these_commands() -> None:
    """Those for the keys and for sshd."""
    page = re.sub(r"\s*\\?\n\s*", " ", (ROOT / "docs" / "DEPLOYMENT.md").read_text())
    assert SSHD in page
    assert re.sub(r"\s*\n\s*", " ", MAKE_KEYS.strip()) in page
