"""A job whose page is looked at, a browser without a window, and a proxy that puts the page below a prefix."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import pathlib
import re
import shutil
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = pathlib.Path(__file__).resolve().parent
PATIENCE = 60
RANKS = 4


class Job:
    """`ronde run` with two sidecars; `pages` are the addresses of their admin pages."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.output = folder / "output.txt"
        worker = [os.environ["RONDE_PYTHON"], str(HERE / "worker.py"), str(folder)]
        command = [os.environ["RONDE_BIN"], "run", "-np", str(RANKS), "--sidecars", "2", "--verbose", *worker]
        with self.output.open("w") as output:
            # Its own group, so that a test that fails ends all of it.
            self.process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        self.pages = self._await_pages()

    def _await_pages(self) -> list[str]:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found: list[str] = re.findall(r"metrics at (http://127\.0\.0\.1:\d+)", self.output.read_text())
            if len(found) == 2:
                return found
            assert self.process.poll() is None, self.output.read_text()
            time.sleep(0.1)
        raise AssertionError(f"no addresses of pages after {PATIENCE} s:\n{self.output.read_text()}")

    def end(self) -> int:
        """Lets the job end; returns its status."""
        (self.folder / "end").touch()
        return self.process.wait(PATIENCE)


@pytest.fixture
def job(tmp_path: pathlib.Path) -> Iterator[Job]:
    """A job that runs until the test ends."""
    if not {"RONDE_BIN", "RONDE_PYTHON"} <= os.environ.keys():
        pytest.skip("RONDE_BIN or RONDE_PYTHON is not set; run the tests by `make page-test`")
    job = Job(tmp_path / "job")
    try:
        yield job
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.process.pid, signal.SIGTERM)
        job.process.wait(PATIENCE)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's Chromium without a window."""
    from selenium import webdriver

    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("Chromium and its driver are not installed: tests/setup/debian.sh page")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    # Root, whom its sandbox refuses, runs tests; it sees no page but the sidecar's.
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    try:
        yield started
    finally:
        started.quit()


@pytest.fixture
def prefix(job: Job) -> Iterator[str]:
    """The address of the coordinator's page below `/jobs/one` of a proxy."""
    target = job.pages[0].removeprefix("http://")

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if not self.path.startswith("/jobs/one"):
                self.send_error(404)
                return
            connection = http.client.HTTPConnection(target, timeout=PATIENCE)
            connection.request("GET", self.path.removeprefix("/jobs/one") or "/")
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.end_headers()
            # The browser goes away in the middle of a stream.
            with contextlib.suppress(OSError):
                while part := answer.read1(65536):
                    self.wfile.write(part)
                    self.wfile.flush()
            connection.close()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/jobs/one"
    finally:
        server.shutdown()
        server.server_close()
