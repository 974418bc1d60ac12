"""Elastic jobs on Ray: workers come and go with the nodes of the cluster.

`ronde run` decides the membership, as everywhere. Its agents run in actors of Ray, one for each node, which hold the
resources of the workers there; `ronde.ray.remote_shell` connects them. The driver writes the nodes of Ray's table to a
file each second, which is the launcher's list of hosts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import shlex
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable

import ray

from ronde import command
from ronde.errors import RondeError
from ronde.private_folder import PrivateFolder
from ronde.ray import discovery as nodes
from ronde.ray.agent import take_gpus
from ronde.ray.discovery import RayHostDiscovery
from ronde.ray.elastic_reports import ElasticReports
from ronde.ray.nodes import uses_tls
from ronde.ray.remote_shell import SETTINGS
from ronde.ray.worker import REPORTS
from ronde.run import Call, run_by

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ronde.ray.executable import Executable
    from ronde.ray.settings import MiniSettings

_log = logging.getLogger("ronde.ray")
_HOSTS = "hosts"
_POLL_S = 1.0
# After an error or an interrupt, how long callbacks and the discovery, which are the program's, may still run.
_LEAVE_TIMEOUT_S = 5.0


@dataclass
class ElasticOptions:
    """How an elastic job begins and what it survives; docs/ELASTIC.md describes the options of the same names.

    min_workers, max_workers                  -- the least and the most workers
    cpus_per_worker, use_gpu, gpus_per_worker -- as for `RayExecutor`
    reset_limit                               -- as `--reset-limit`
    cooldown_range                            -- as `--blacklist-cooldown-range`
    elastic_timeout                           -- as `--elastic-timeout`
    discovery                                 -- finds the nodes; default: `RayHostDiscovery`
    variables                                 -- for the workers
    """

    min_workers: int
    max_workers: int | None = None
    cpus_per_worker: float = 1
    use_gpu: bool = False
    gpus_per_worker: float | None = None
    reset_limit: int | None = None
    cooldown_range: Sequence[int] | None = None
    elastic_timeout: float = 600
    discovery: Any = None
    variables: dict[str, str] = field(default_factory=dict)

    def words(self, settings: MiniSettings) -> list[str]:
        """Returns the options as arguments of `ronde run`."""
        given = {
            "min-np": self.min_workers,
            "max-np": self.max_workers,
            "reset-limit": self.reset_limit,
            "elastic-timeout": int(self.elastic_timeout),
            "start-timeout": max(1, int(settings.timeout_s)),
            "network-interfaces": settings.interfaces() or None,
        }
        words = [word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))]
        if self.cooldown_range is not None:
            words += ["--blacklist-cooldown-range", *map(str, self.cooldown_range)]
        return words + [word for name in self.variables for word in ("-x", name)]


class ElasticWorkers:
    """Runs functions as elastic jobs, one after the other."""

    def __init__(self, settings: MiniSettings, options: ElasticOptions) -> None:
        self._settings, self._options = settings, options
        self._executable: Executable | None = None
        gpus = 1.0 if options.gpus_per_worker is None else options.gpus_per_worker
        self._gpus = gpus if options.use_gpu else 0.0
        self.discovery = options.discovery
        if self.discovery is None:
            self.discovery = RayHostDiscovery(options.use_gpu, options.cpus_per_worker, gpus)
        # Names of the discovery that no node has, and that were logged.
        self._reported: set[str] = set()

    def check(self) -> None:
        """Raises RondeError with cause "settings" if a node with slots is another host and Ray has no TLS."""
        others = [] if uses_tls() else self._others(self._slots())
        if others:
            raise RondeError(
                f"the nodes {', '.join(others)} are other hosts, whose sidecars get certificates over Ray's "
                "connections, and these are plaintext. Start Ray with RAY_USE_TLS=1 on all nodes and the driver "
                "(docs/RAY.md), or run the program by `ronde run --min-np`, which reaches hosts by ssh "
                "(docs/ELASTIC.md)",
                "settings",
            )

    def _slots(self) -> dict[str, int]:
        """Returns the slots of each node."""
        return nodes.slots_of_nodes(self.discovery, self._reported)

    def _others(self, slots: Mapping[str, int]) -> list[str]:
        own, addresses = ray.util.get_node_ip_address(), nodes.addresses()
        return sorted({addresses[node] for node in slots if node in addresses and addresses[node] != own})

    def start(self, executable: Executable, variables: Mapping[str, str]) -> None:
        """Checks that a job can begin. Workers start with each call."""
        self.check()
        self._executable = executable
        self._options.variables = dict(variables)

    def shutdown(self) -> None:
        """Does nothing: workers end with each call."""

    def execute(self, func: Callable[[Any], Any], callbacks: Sequence[Callable[[Any], Any]] | None = None) -> list[Any]:
        """Returns `func(executable)` of the workers at the end, by rank.

        callbacks -- called with each value that rank 0 reports, in a thread; the first exception of one ends the job

        Raises RuntimeError if fewer than `min_workers` remain, or all have failed, with the first traceback, or if
        results are missing; and the exception of a callback.
        """
        if self._executable is None:
            raise RuntimeError("the executor was not started; call start() first")
        self.check()
        call = Call(_on_executable, (self._executable, func, self._options.use_gpu), {})
        reports = ElasticReports(callbacks or ())
        threads = _Threads(reports, self._write)

        def words(report: str) -> list[str]:
            folder = pathlib.Path(report).parent
            self._write(folder)
            threads.start(folder)
            return self._words(folder, report)

        variables = self._options.variables
        try:
            results = run_by(words, call, None, ended=threads.end, variables=variables, poll=reports.check)
            # The last values come when the launcher has ended.
            reports.check()
        except BaseException as error:
            reports.log_failure(error)
            raise
        return results

    def _words(self, folder: pathlib.Path, report: str) -> list[str]:
        shell = shlex.join([sys.executable, "-m", "ronde.ray.remote_shell", str(folder)])
        hosts = shlex.join(["cat", str(folder / _HOSTS)])
        words = [command.find(), "run", "--remote-shell", shell, "--host-discovery-script", hosts]
        words += self._options.words(self._settings)
        return [*words, "-x", f"{REPORTS}={folder}", "--report", report, "--"]

    def _write(self, path: pathlib.Path) -> None:
        """Writes the list of hosts, and which nodes they are."""
        slots = self._slots()
        if not uses_tls():
            others, addresses = set(self._others(slots)), nodes.addresses()
            slots = {node: count for node, count in slots.items() if addresses.get(node) not in others}
        # The actor of a node reserves what all its slots need, so slots in excess could keep it from starting.
        most = self._options.max_workers
        slots = {node: count if most is None else min(count, most) for node, count in slots.items()}
        cpus = self._options.cpus_per_worker
        described = {
            _host(node): {"id": node, "cpus": cpus * count, "gpus": self._gpus * count} for node, count in slots.items()
        }
        settings = {
            "address": ray.get_runtime_context().gcs_address,
            "nodes": described,
            "start_timeout_s": self._settings.start_timeout,
        }
        with contextlib.closing(PrivateFolder(path)) as folder:
            folder.replace(SETTINGS, json.dumps(settings).encode())
            lines = [f"{_host(node)}:{count}\n" for node, count in slots.items()]
            folder.replace(_HOSTS, "".join(lines).encode())


class _Threads:
    """What this process does while the launcher runs: it writes the list of hosts, and calls the callbacks.

    write -- writes the list of hosts to a folder
    """

    def __init__(self, reports: ElasticReports, write: Callable[[pathlib.Path], None]) -> None:
        self._reports, self._write = reports, write
        self._stopped = threading.Event()
        self._follower: threading.Thread | None = None
        # The caller may be handling another exception.
        self._outer = sys.exc_info()[1]

    def start(self, path: pathlib.Path) -> None:
        """Starts the threads. The path is that of the folder of the call."""
        self._follower = threading.Thread(target=self._follow, args=(path,), daemon=True)
        self._follower.start()
        self._reports.start(path)

    def end(self) -> None:
        """Ends the threads. Waits for callbacks: without a limit after the launcher's end, else for a few seconds."""
        self._stopped.set()
        timeout = None if sys.exc_info()[1] is self._outer else _LEAVE_TIMEOUT_S
        self._reports.end(timeout)
        if self._follower is not None:
            self._follower.join(timeout)

    def _follow(self, path: pathlib.Path) -> None:
        failed = False
        while not self._stopped.wait(_POLL_S):
            try:
                self._write(path)
                failed = False
            except Exception as error:  # a discovery of the program may raise any
                if not failed and not self._stopped.is_set():
                    _log.warning("the nodes of Ray cannot be listed, so the job keeps those that it has: %s", error)
                failed = True


def _on_executable(executable: Executable, func: Callable[[Any], Any], use_gpu: bool) -> Any:
    if use_gpu:
        take_gpus(os.environ[REPORTS])
    made = None if executable.kind is None else executable.kind(*executable.args, **executable.kwargs)
    return func(made)


def _host(node: str) -> str:
    """Returns the name by which the launcher knows a node."""
    return f"ray-{node[:16]}"
