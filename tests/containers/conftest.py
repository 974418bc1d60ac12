"""Fixtures of the tests with containers: an engine, the images, and a compose project."""

from __future__ import annotations

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from engine import Engine, engine
from project import ROOT, Project

PACKING = ROOT / "sdk-python" / "packing" / "wheel.py"
ENVIRONMENT = ROOT / "tests" / "setup" / "environment.py"
BASE = "ronde-test-base"
BASE_SCRIPT = ROOT / "compose" / "base-image"
# Stages of images serve only as a build cache: the tests' own engine removes them at this age.
STAGES_KEPT = "168h"
SIDECAR = "ronde-test-sidecar"
WORKER = "ronde-test-worker"
MPI = "ronde-test-mpi"
# Installing PyTorch is most of it, where the engine has nothing in its cache.
BUILD_S = 1800
# What an image is made of, besides the wheel.
CONTEXT = ["compose", "sdk-python/examples", "tests/setup"]


def required(what: str) -> bool:
    """Whether RONDE_REQUIRE lists it, so that its lack fails a test instead of skipping it."""
    return what in os.environ.get("RONDE_REQUIRE", "").split(",")


def leave_out(what: str, reason: str) -> None:
    """Skips a test, or fails if RONDE_REQUIRE lists what it needs."""
    if required(what):
        pytest.fail(f"RONDE_REQUIRE names {what}, but {reason}", pytrace=False)
    pytest.skip(f"{what}: {reason}")


@pytest.fixture(scope="session")
def docker() -> Iterator[Engine]:
    """An engine."""
    with engine() as found:
        if isinstance(found, str):
            leave_out("docker", found)
        elif found.compose is None:
            leave_out("docker", "neither `docker compose` nor docker-compose is installed")
        else:
            yield found


Build = Callable[..., None]


@pytest.fixture(scope="session")
def build(docker: Engine, tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds a target of the Dockerfile from the output of `make build`, with further arguments, under a tag."""
    context = tmp_path_factory.mktemp("context")
    for name in CONTEXT:
        shutil.copytree(ROOT / name, context / name, ignore=shutil.ignore_patterns("__pycache__"))
    pack(context / "dist")
    arguments = []
    if docker.is_own:
        # No registry may answer here.
        base = provide_base(docker)
        arguments = ["--network", "host", "--build-arg", f"BASE={base}", "--build-arg", f"BUILDER={base}"]
    else:
        # The wheel exists, so its image needs no compiler.
        arguments = ["--build-arg", "BUILDER=debian:bookworm-slim"]

    def build_target(target: str, tag: str, *further: str) -> None:
        place = ["-f", str(context / "compose" / "Dockerfile"), "--target", target, "-t", tag, str(context)]
        docker.run("build", *arguments, *further, *place, timeout_s=BUILD_S)

    return build_target


@pytest.fixture(scope="session")
def images(docker: Engine, build: Build) -> dict[str, int]:
    """Builds the images of the compose file; returns their sizes in bytes."""
    sizes = {}
    for target, tag in [("sidecar", SIDECAR), ("worker", WORKER), ("mpi", MPI)]:
        build(target, tag)
        sizes[target] = int(docker.run("image", "inspect", "--format", "{{.Size}}", tag))
    if docker.is_own:
        docker.run("image", "prune", "--force", "--filter", f"until={STAGES_KEPT}")
    print("\nimages: " + ", ".join(f"{target} {size / 1e6:.0f} MB" for target, size in sizes.items()), file=sys.stderr)
    return sizes


def provide_base(docker: Engine) -> str:
    """Makes the base image, unless it exists; returns its name. Removes former ones."""
    suite = subprocess.run([str(BASE_SCRIPT), "--suite"], check=True, capture_output=True, text=True, timeout=60).stdout
    digest = hashlib.sha256(BASE_SCRIPT.read_bytes() + suite.encode()).hexdigest()[:12]
    base = f"{BASE}:{digest}"
    there = docker.run("images", "--format", "{{.Repository}}:{{.Tag}}", BASE).split()
    if base not in there:
        environment = {**docker.environment, "DOCKER": docker.client}
        subprocess.run([str(BASE_SCRIPT), base], env=environment, check=True, timeout=BUILD_S)
    for former in there:
        if former != base:
            docker.run("image", "rm", "--force", former)
    return base


def pack(out: pathlib.Path) -> None:
    """Packs the wheel from the artefacts next to RONDE_BIN."""
    binary = os.environ.get("RONDE_BIN")
    assert binary, "RONDE_BIN names no program; run the tests by `make compose-test`"
    subprocess.run([sys.executable, str(ENVIRONMENT), "packaging"], check=True)
    path = [sys.executable, str(ENVIRONMENT), "path", "packaging"]
    python = subprocess.run(path, check=True, capture_output=True, text=True).stdout.strip()
    environment = {**os.environ, "CARGO_TARGET_DIR": str(pathlib.Path(binary).parent.parent)}
    command = [python, str(PACKING), "--dev", "--out", str(out)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture
def project(docker: Engine, images: dict[str, int]) -> Iterator[Callable[..., Project]]:
    """Makes projects of the compose file, and removes them after the test."""
    made: list[Project] = []

    def make(*files: pathlib.Path, **settings: str) -> Project:
        images_of = {"RONDE_SIDECAR_IMAGE": SIDECAR, "RONDE_WORKER_IMAGE": WORKER}
        made.append(Project(docker, *files, **images_of, **settings))
        return made[-1]

    yield make
    for one in made:
        one.remove()
