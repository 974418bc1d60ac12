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
import pickle
import shlex
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable

import ray

from ronde import command
from ronde.cluster.agent import FILES, VALUE
from ronde.errors import RondeError
from ronde.private_folder import PrivateFolder
from ronde.ray import discovery as nodes
from ronde.ray.agent import take_gpus
from ronde.ray.discovery import RayHostDiscovery
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
        self.discovery = options.discovery or RayHostDiscovery(options.use_gpu, options.cpus_per_worker, gpus)

    def check(self) -> None:
        """Raises RondeError with cause "settings" if a node with slots is another host and Ray has no TLS."""
        others = [] if uses_tls() else self._others(nodes.slots_of_nodes(self.discovery))
        if others:
            raise RondeError(
                f"the nodes {', '.join(others)} are other hosts, whose sidecars get certificates over Ray's "
                "connections, and these are plaintext. Start Ray with RAY_USE_TLS=1 on all nodes and the driver "
                "(docs/RAY.md), or run the program by `ronde run --min-np`, which reaches hosts by ssh "
                "(docs/ELASTIC.md)",
                "settings",
            )

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

        Raises RuntimeError if fewer than `min_workers` remain, or all have failed; with the first traceback.
        """
        if self._executable is None:
            raise RuntimeError("the executor was not started; call start() first")
        self.check()
        call = Call(_on_executable, (self._executable, func, self._options.use_gpu), {})
        stopped = threading.Event()
        threads: list[threading.Thread] = []

        def words(report: str) -> list[str]:
            folder = pathlib.Path(report).parent
            self._write(folder)
            threads.append(threading.Thread(target=self._follow, args=(folder, stopped), daemon=True))
            if callbacks:
                threads.append(threading.Thread(target=_deliver, args=(folder, stopped, callbacks), daemon=True))
            for thread in threads:
                thread.start()
            return self._words(folder, report)

        def ended() -> None:
            stopped.set()
            for thread in threads:
                thread.join()

        return run_by(words, call, None, ended=ended, variables=self._options.variables)

    def _words(self, folder: pathlib.Path, report: str) -> list[str]:
        shell = shlex.join([sys.executable, "-m", "ronde.ray.remote_shell", str(folder)])
        hosts = shlex.join(["cat", str(folder / _HOSTS)])
        words = [command.find(), "run", "--remote-shell", shell, "--host-discovery-script", hosts]
        words += self._options.words(self._settings)
        return [*words, "-x", f"{REPORTS}={folder}", "--report", report, "--"]

    def _write(self, path: pathlib.Path) -> None:
        """Writes the list of hosts, and which nodes they are."""
        slots = nodes.slots_of_nodes(self.discovery)
        if not uses_tls():
            others, addresses = set(self._others(slots)), nodes.addresses()
            slots = {node: count for node, count in slots.items() if addresses.get(node) not in others}
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

    def _follow(self, path: pathlib.Path, stopped: threading.Event) -> None:
        failed = False
        while not stopped.wait(_POLL_S):
            try:
                self._write(path)
                failed = False
            except Exception as error:  # a discovery of the program may raise any
                if not failed:
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


def _deliver(path: pathlib.Path, stopped: threading.Event, callbacks: Sequence[Callable[[Any], Any]]) -> None:
    """Calls the callbacks with the values that workers leave in the folder, those of each worker in their order."""
    with contextlib.closing(PrivateFolder(path)) as folder:
        is_last = False
        while not is_last:
            is_last = stopped.wait(_POLL_S / 2)
            names = [name for name in os.listdir(path) if name.startswith(f"{VALUE}.") and FILES.fullmatch(name)]
            for name in sorted(names, key=_number):
                content = folder.read(name)
                (path / name).unlink()
                _call(callbacks, content)


def _number(name: str) -> tuple[int, int]:
    """Returns the order of a value's file: by its number, then by its worker."""
    _, worker, number = name.split(".")
    return int(number), int(worker)


def _call(callbacks: Sequence[Callable[[Any], Any]], content: bytes) -> None:
    try:
        value = pickle.loads(content)
    except Exception:  # what the classes of the program raise
        _log.exception("a value that a rank reported cannot be unpickled here; it is dropped, and the job goes on")
        return
    for callback in callbacks:
        try:
            callback(value)
        except Exception:
            _log.exception("a callback has failed for a value that rank 0 reported; the job goes on")
