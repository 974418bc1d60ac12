"""Debian's Prometheus scrapes the sidecars of a running job, and each query of the dashboard has an answer."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import leave_out
from project import ROOT

MONITORING = ROOT / "compose" / "monitoring"
PATIENCE_S = 120


@pytest.fixture
def sidecars() -> Iterator[list[str]]:
    """A running job; returns the addresses of its sidecars' admin pages."""
    binary = os.environ.get("RONDE_BIN")
    assert binary, "RONDE_BIN names no program; run the tests by `make compose-test`"
    endless = [sys.executable, str(pathlib.Path(__file__).with_name("endless.py")), "--steps", "1000000"]
    command = [binary, "run", "-np", "2", "--sidecars", "2", *endless]
    # Not `tmp_path`: it is too long for the path of a Unix socket.
    with tempfile.TemporaryDirectory(prefix="r-") as folder:
        runtime = pathlib.Path(folder)
        environment = {**os.environ, "XDG_RUNTIME_DIR": folder}
        job = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

        def written() -> bool:
            assert job.poll() is None, f"the job ended with {job.returncode}"
            return len(list(runtime.glob("ronde-*/admin"))) == 2

        try:
            until(written, "the sidecars' admin pages")
            yield sorted(path.read_text().strip() for path in runtime.glob("ronde-*/admin"))
        finally:
            job.terminate()
            job.wait(60)


@pytest.fixture
def prometheus(sidecars: list[str], tmp_path: pathlib.Path) -> Iterator[str]:
    """Prometheus with the file of compose/monitoring, in which nothing but the addresses is another one."""
    program = shutil.which("prometheus")
    if program is None:
        leave_out("docker", "Debian's package `prometheus` is not installed")
    lines = (MONITORING / "prometheus.yml").read_text().splitlines()
    first = next(index for index, line in enumerate(lines) if ".metrics:9400" in line)
    kept = [line for line in lines if ".metrics:9400" not in line]
    indent = lines[first].split("-")[0]
    configuration = tmp_path / "prometheus.yml"
    configuration.write_text(
        "\n".join([*kept[:first], *(f"{indent}- {address}" for address in sidecars), *kept[first:]])
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    storage = ["--storage.tsdb.path", str(tmp_path / "data"), "--web.listen-address", listen]
    with open(tmp_path / "prometheus.log", "w") as log:
        process = subprocess.Popen([program, f"--config.file={configuration}", *storage], stdout=log, stderr=log)
    try:
        yield f"http://{listen}"
    finally:
        process.terminate()
        process.wait(60)


def test_every_panel_has_an_answer(prometheus: str, sidecars: list[str]) -> None:
    """Both sidecars are up, and no panel stays empty."""
    until(lambda: sorted(up(prometheus)) == sidecars, "both sidecars to be up")
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    for panel in panels:
        for target in panel["targets"]:
            expression = target["expr"]
            until(lambda expression=expression: bool(ask(prometheus, expression)), f"{panel['title']}: {expression}")


def up(prometheus: str) -> list[str]:
    """The addresses that answer Prometheus."""
    return [series["metric"]["instance"] for series in ask(prometheus, "up == 1")]


def ask(prometheus: str, expression: str) -> list[Any]:
    """The series of an expression; none while Prometheus starts, or where nothing is a number."""
    query = urllib.parse.urlencode({"query": expression})
    try:
        with urllib.request.urlopen(f"{prometheus}/api/v1/query?{query}", timeout=10) as answer:
            page = json.load(answer)
    except (ConnectionError, urllib.error.URLError):
        return []
    assert page["status"] == "success", page
    return [series for series in page["data"]["result"] if series["value"][1] != "NaN"]


def until(seen: Callable[[], bool], what: str) -> None:
    """Polls a condition until a deadline."""
    deadline = time.monotonic() + PATIENCE_S
    while not seen():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.2)
