"""Fixtures of the deployment tests: hosts, the program, and the environment of the checks of manifests."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hosts import Hosts, run

ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENT = ROOT / "tests" / "setup" / "environment.py"
CHART = ROOT / "compose" / "kubernetes" / "chart"
WORKER = pathlib.Path(__file__).with_name("worker.py")


def pytest_configure(config: pytest.Config) -> None:
    """Names the tests that `make test` leaves to `make deploy-test`."""
    config.addinivalue_line("markers", "heavy: takes ten seconds or more; `make deploy-test` runs it")


def leave_out(what: str, reason: str) -> None:
    """Skips a test, or fails if RONDE_REQUIRE lists what it needs."""
    if what in os.environ.get("RONDE_REQUIRE", "").split(","):
        pytest.fail(f"RONDE_REQUIRE names {what}, but {reason}", pytrace=False)
    pytest.skip(f"LEFT OUT: {reason}")


@pytest.fixture(scope="session")
def ronde() -> str:
    """The program."""
    binary = os.environ.get("RONDE_BIN")
    if not binary:
        pytest.skip("RONDE_BIN is not set; run the tests by `make deploy-test`")
    return binary


@pytest.fixture
def folder() -> Iterator[pathlib.Path]:
    """A folder whose path is short enough for a Unix socket, and that other users may enter."""
    with tempfile.TemporaryDirectory(prefix="rd-") as name:
        path = pathlib.Path(name)
        path.chmod(0o755)
        yield path


@pytest.fixture
def make_hosts(folder: pathlib.Path) -> Iterator[Callable[[Sequence[Sequence[str]]], Hosts]]:
    """Makes hosts with these names; they are removed in the end."""
    made: list[Hosts] = []

    def make(names: Sequence[Sequence[str]]) -> Hosts:
        if why_not := Hosts.why_not():
            leave_out("netns", why_not)
        made.append(Hosts(names, folder))
        return made[-1]

    yield make
    for hosts in made:
        hosts.close()


@pytest.fixture(scope="session")
def tools() -> pathlib.Path:
    """The folder of programs of the environment `deploy`: its python, shellcheck, and helm where there is one."""
    subprocess.run([sys.executable, str(ENVIRONMENT), "deploy", "helm"], check=True, stdout=sys.stderr)
    path = subprocess.run(
        [sys.executable, str(ENVIRONMENT), "path", "deploy"], check=True, capture_output=True, text=True
    )
    return pathlib.Path(path.stdout.strip()).parent


def results(output: str) -> list[dict[str, Any]]:
    """The results that workers print."""
    found = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(found, key=lambda result: result["rank"])


class Rendered:
    """Renders the chart, and checks everything that it makes."""

    def __init__(self, tools: pathlib.Path) -> None:
        self._tools = tools

    def __call__(self, form: str, *settings: str, name: str) -> dict[str, list[dict[str, Any]]]:
        """The objects of a form by kind; there may be no mistakes."""
        return self.checked(self.text(form, *settings, name=name))

    def text(self, form: str, *settings: str, name: str) -> str:
        """What helm makes of the chart with these settings."""
        done = self.helm(
            "template", name, str(CHART), *(word for s in [f"form={form}", *settings] for word in ("--set", s))
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def helm(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs helm, without a cluster."""
        program = self._tools / "helm"
        if not program.exists():
            leave_out("helm", "there is no helm for this machine; the manifests in compose/kubernetes are checked")
        return run([str(program), *words], 60)

    def read(self, path: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
        """The objects of a file by kind; there may be no mistakes."""
        return self.checked(path.read_text())

    def checked(self, text: str) -> dict[str, list[dict[str, Any]]]:
        """The objects by kind; there may be no mistakes."""
        documents, mistakes = self.check(text)
        assert mistakes == []
        found: dict[str, list[dict[str, Any]]] = {}
        for document in documents:
            found.setdefault(document["kind"], []).append(document)
        return found

    def check(self, text: str) -> tuple[list[dict[str, Any]], list[str]]:
        """The objects and the mistakes in them."""
        command = [str(self._tools / "python"), str(ROOT / "tests" / "deploy" / "manifests.py"), "-"]
        done = run(command, 60, input=text)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        return found["documents"], found["mistakes"]


@pytest.fixture(scope="session")
def rendered(tools: pathlib.Path) -> Rendered:
    """Renders the chart."""
    return Rendered(tools)
