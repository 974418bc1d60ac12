"""Sidecars and workers as processes on hosts, and what they report."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from typing import Any, Callable

from soak.network import Network

# Before the ports of data lanes.
PORT = 7400
PEER_TIMEOUT_S = 8
ARENA_MB = 64
STOP_S = 20.0
HERE = pathlib.Path(__file__).parent


class Process:
    """A process whose standard output is JSON, a line each."""

    def __init__(self, command: list[str], environment: dict[str, str], log: pathlib.Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self.started = time.monotonic()
        # It ends with this process, however that ends.
        command = ["setpriv", "--pdeathsig", "KILL", *command]
        with log.open("ab") as stderr:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **environment},
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """`ip netns exec` becomes its command, so that it is the same process."""
        return self._popen.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs or is stopped."""
        return self._popen.poll() is None

    @property
    def status(self) -> int | None:
        """The exit status; None while it runs, and minus its number after a signal."""
        return self._popen.poll()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal, if it is alive."""
        if self.is_alive:
            self._popen.send_signal(number)

    def end(self, within: float = STOP_S) -> None:
        """Asks it to end, and kills it when that takes too long."""
        for number, patience in ((signal.SIGCONT, 0.0), (signal.SIGTERM, within), (signal.SIGKILL, STOP_S)):
            self.signal(number)
            try:
                self._popen.wait(patience)
                break
            except subprocess.TimeoutExpired:
                continue
        self._reader.join(STOP_S)

    def wait_for(self, is_wanted: Callable[[dict[str, Any]], bool], within: float) -> dict[str, Any]:
        """Returns the first line that matches. Raises TimeoutError."""
        end = time.monotonic() + within
        while time.monotonic() < end:
            found = next((line for line in list(self.lines) if is_wanted(line)), None)
            if found is not None:
                return found
            time.sleep(0.02)
        raise TimeoutError(f"process {self.pid} has not reported within {within:.0f} s: {self.lines[-3:]}")

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            if line.startswith("{"):
                self.lines.append({**json.loads(line), "at": time.monotonic()})


@dataclasses.dataclass(frozen=True)
class Usage:
    """The resources that a process uses; its memory excludes the memory that it shares with workers."""

    memory_mb: float
    descriptors: int


def usage(pid: int) -> Usage:
    """The resources of a running process."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    kilobytes = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))
    return Usage(kilobytes / 1024, len(list(pathlib.Path(f"/proc/{pid}/fd").iterdir())))


class Job:
    """Four sidecars or any other number, and the same number of workers on each.

    folder -- for everything that the job writes; `logs/HOST` in it are small file systems of their own
    """

    def __init__(self, network: Network, binary: str, folder: pathlib.Path, ranks_per_host: int) -> None:
        self.network, self.binary, self.folder = network, binary, folder
        self.placement = [host for host in range(network.hosts) for _ in range(ranks_per_host)]
        self.stop_file = folder / "stop"
        for host in range(network.hosts):
            self.clock(host).write_text("+0\n")
        self.sidecars: list[Process] = []
        self.workers: list[Process] = []
        # Workers that have been replaced.
        self.past: list[Process] = []

    def start(self) -> None:
        """Starts all processes."""
        for host in range(self.network.hosts):
            self.sidecars.append(self.new_sidecar(host))
        for rank in range(len(self.placement)):
            self.workers.append(self.new_worker(rank))

    def new_sidecar(self, host: int) -> Process:
        """Starts the sidecar of a host."""
        peers = ",".join(f"{self.network.address(each)}:{PORT}" for each in range(self.network.hosts))
        options = {
            "certs": self.folder / f"certs/sidecar-{host}",
            "peers": peers,
            "placement": ",".join(map(str, self.placement)),
            "socket-dir": self.folder / f"sockets-{host}",
            "peer-timeout": PEER_TIMEOUT_S,
            "start-timeout": 60,
            "arena-mb": ARENA_MB,
            "plugin": self.folder / "trap.wasm",
        }
        command = [self.binary, "sidecar", *(f"--{name}={value}" for name, value in options.items())]
        environment = {"XDG_CACHE_HOME": str(self.logs(host)), **self._faked_clock(host)}
        return Process(self.network.on(host, command), environment, self.logs(host) / "sidecar.log")

    def new_worker(self, rank: int) -> Process:
        """Starts a worker."""
        host = self.placement[rank]
        environment = {
            "RONDE_SOCKET": str(self.folder / f"sockets-{host}"),
            "RONDE_JOB": "soak",
            "RONDE_RANK": str(rank),
            "RONDE_CONNECT_TIMEOUT": "60",
            "RONDE_SOAK_STOP": str(self.stop_file),
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
            # Threads of numpy would only be in each other's way.
            "OMP_NUM_THREADS": "1",
        }
        command = self.network.on(host, [sys.executable, "-m", "soak.worker"])
        return Process(command, environment, self.folder / f"worker-{rank}.log")

    def replace_worker(self, rank: int) -> None:
        """Starts another worker in the place of one that has ended."""
        self.workers[rank].end()
        self.past.append(self.workers[rank])
        self.workers[rank] = self.new_worker(rank)

    def start_again(self) -> None:
        """Ends everything and starts the job as a new one: a sidecar that has died does not come back into its job."""
        self.end()
        self.past += self.workers
        self.sidecars, self.workers = [], []
        self.start()

    def logs(self, host: int) -> pathlib.Path:
        """The small file system of a host's sidecar, for its log and its cache."""
        return self.folder / "logs" / str(host)

    def end_of_sidecar(self, host: int) -> str:
        """The state of a host's sidecar, and the end of its log."""
        status = self.sidecars[host].status
        log = (self.logs(host) / "sidecar.log").read_text(errors="replace").splitlines()[-3:]
        return f"sidecar {host} {'runs' if status is None else f'ended with {status}'}: {log}"

    def served(self, host: int) -> list[int]:
        """The ranks of a host."""
        return [rank for rank, where in enumerate(self.placement) if where == host]

    def end(self) -> None:
        """Ends all processes."""
        for process in [*self.workers, *self.sidecars]:
            process.end()

    def clock(self, host: int) -> pathlib.Path:
        """The file with the number of seconds by which the clock of a host's sidecar is wrong."""
        return self.folder / f"clock-{host}"

    def _faked_clock(self, host: int) -> dict[str, str]:
        """The variables that let a test move a sidecar's clock while it runs; none without libfaketime."""
        library = faketime()
        if library is None:
            return {}
        return {
            "LD_PRELOAD": library,
            "FAKETIME_TIMESTAMP_FILE": str(self.clock(host)),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


def last(process: Process, key: str) -> int:
    """The newest value that a process has reported; 0 before the first."""
    return next((line[key] for line in reversed(process.lines) if key in line), 0)


def faketime() -> str | None:
    """The libfaketime library, if it is installed."""
    found = sorted(pathlib.Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))
    return str(found[0]) if found else None
