"""Worlds: long-lived processes, one per rank, that run programs and report what they saw."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from typing import Any

WORKER = pathlib.Path(__file__).with_name("worker.py")
PACKAGE = pathlib.Path(__file__).resolve().parents[2] / "python"
# Importing torch in several processes on a loaded machine is slow.
START_TIMEOUT_S = 120.0
# Programs take milliseconds, and a group gives an operation up after `GROUP_TIMEOUT_S` of c10d_worker.py.
PROGRAM_TIMEOUT_S = 150.0
# For a rank to write its stack after it was found to hang.
STACK_TIMEOUT_S = 20.0
# The last frame that faulthandler writes of the main thread's stack.
LAST_FRAME = "in <module>"

Program = dict[str, Any]
Report = dict[str, Any]


class WorldError(Exception):
    """A world could not be started, or violates the protocol. This is not a difference."""


class World:
    """One process per rank, started when the first program comes.

    backend  -- "ronde" or "gloo" of torch.distributed, or "torch", which is ronde.torch
    ranks    -- how many processes
    sidecars -- among which `ronde run` divides them
    """

    def __init__(self, backend: str, ranks: int, sidecars: int = 1) -> None:
        self.backend, self.ranks, self.sidecars = backend, ranks, sidecars
        self.starts = 0
        self._launched: list[subprocess.Popen[bytes]] = []
        self._connections: dict[int, Connection] = {}
        self._pids: dict[int, int] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def _is_job(self) -> bool:
        """Whether it is started by `ronde run`."""
        return self.backend != "gloo"

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def __str__(self) -> str:
        return f"{self.backend}, {self.ranks} ranks"

    def run(self, program: Program) -> list[Report]:
        """What each rank reports of a program, in the order of ranks.

        A rank whose process ends reports {"died": how}; one that does not answer in time {"hung": its stack}. After
        either the processes are replaced before the next program.
        """
        if not self._connections:
            self._start()
        for rank, connection in self._connections.items():
            try:
                connection.send(program)
            except OSError as error:
                raise WorldError(f"rank {rank} of {self} was gone before the program {program}: {error}") from error
        reports = self._collect(time.monotonic() + PROGRAM_TIMEOUT_S)
        if any("died" in report or "hung" in report for report in reports):
            self.stop()
        return reports

    def _collect(self, deadline: float) -> list[Report]:
        """One report of each rank, or what became of it."""
        reports: dict[int, Report] = {}
        while len(reports) < self.ranks:
            open_ranks = {self._connections[rank]: rank for rank in self._connections if rank not in reports}
            ready = wait(list(open_ranks), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                try:
                    reports[open_ranks[connection]] = connection.recv()
                except EOFError:
                    reports[open_ranks[connection]] = {"died": self._last_words(open_ranks[connection])}
        for rank in set(self._connections) - set(reports):
            reports[rank] = {"hung": self._stack(rank)}
        return [reports[rank] for rank in range(self.ranks)]

    def _stack(self, rank: int) -> str:
        """Where a rank is, as faulthandler writes it."""
        path = self._path(f"stack-{rank}")
        try:
            os.kill(self._pids[rank], signal.SIGUSR1)
        except ProcessLookupError:
            return "its process has ended"
        end = time.monotonic() + STACK_TIMEOUT_S
        while LAST_FRAME not in (text := path.read_text()) and time.monotonic() < end:
            time.sleep(0.05)
        return text or "it wrote no stack"

    def _last_words(self, rank: int) -> str:
        text = self._path("output").read_text(errors="replace")
        return f"rank {rank} ended; the last output of {self} is:\n{text[-2_000:]}"

    def _path(self, name: str) -> pathlib.Path:
        assert self._folder is not None
        return pathlib.Path(self._folder.name) / name

    def _start(self) -> None:
        self.starts += 1
        self._folder = tempfile.TemporaryDirectory(prefix="ronde-differential-")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(self._path("socket")))
            listener.listen(self.ranks)
            self._launch()
            deadline = time.monotonic() + START_TIMEOUT_S
            try:
                while len(self._connections) < self.ranks:
                    self._admit(self._next(listener, deadline), deadline)
            except (TimeoutError, EOFError) as error:
                text = self._path("output").read_text(errors="replace")
                missing = sorted(set(range(self.ranks)) - set(self._connections))
                self.stop()
                raise WorldError(f"ranks {missing} of {self} did not start:\n{text}") from error

    def _next(self, listener: socket.socket, deadline: float) -> socket.socket:
        """A rank's connection. Raises TimeoutError when none comes, or when a process has ended."""
        while True:
            listener.settimeout(min(0.5, max(0.1, deadline - time.monotonic())))
            with contextlib.suppress(TimeoutError):
                return listener.accept()[0]
            if time.monotonic() > deadline or any(each.poll() is not None for each in self._launched):
                raise TimeoutError

    def _admit(self, accepted: socket.socket, deadline: float) -> None:
        accepted.settimeout(None)
        connection = Connection(accepted.detach())
        if not connection.poll(max(0.1, deadline - time.monotonic())):
            raise TimeoutError
        rank, pid = connection.recv()
        self._connections[rank], self._pids[rank] = connection, pid

    def _launch(self) -> None:
        """Starts the processes: by `ronde run`, or one by one."""
        worker = [sys.executable, "-W", "ignore", str(WORKER), self.backend, str(self.ranks), str(self._path("."))]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(WORKER.parent.parent)]),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        if self._is_job:
            options = ["-np", str(self.ranks), "--sidecars", str(self.sidecars), "--start-timeout", "120"]
            commands = [[os.environ["RONDE_BIN"], "run", *options, *worker]]
        else:
            commands = [[*worker, str(rank)] for rank in range(self.ranks)]
        with open(self._path("output"), "wb") as output:
            for command in commands:
                started = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
                self._launched.append(started)

    def stop(self) -> None:
        """Ends the processes, by force where they do not end by themselves."""
        for connection in self._connections.values():
            try:
                connection.send(None)
            except OSError:  # it has ended
                continue
        end = time.monotonic() + 5.0
        for launched in self._launched:
            try:
                launched.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._kill(launched)
        for connection in self._connections.values():
            connection.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._launched, self._connections, self._pids, self._folder = [], {}, {}, None

    def _kill(self, launched: subprocess.Popen[bytes]) -> None:
        """Ends a launcher, and its ranks, which it may not reach while they hang."""
        launched.terminate()
        for pid in self._pids.values() if self._is_job else [launched.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            launched.wait(10.0)
        except subprocess.TimeoutExpired:
            launched.kill()
            launched.wait()
