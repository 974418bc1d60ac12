"""Starts the sidecar of the workers when the first of them asks for it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from ronde import own_sidecar
from ronde.agent_directory import AgentDirectory, Request
from ronde.errors import RondeError
from ronde.torchrun import sidecars
from ronde.torchrun.replica import Operation
from ronde.torchrun.store import until_all

if TYPE_CHECKING:
    import pathlib

    from ronde.torchrun.configuration import Configuration
    from ronde.torchrun.link import Link

_POLL_INTERVAL_S = 0.05
_KEY = "ronde/workers"
# Workers of other nodes may come late: each worker has a timeout of its own, and asks as long as it waits.
_SIZES_TIMEOUT_S = 86_400.0
_SECRET_HEADER = "ronde job secret 1"


class Workers:
    """The workers of one start, for the agent of a node.

    rank   -- the number of the node
    job    -- the name of the workers' job
    secret -- its secret, 64 hexadecimal digits, the same on all nodes
    link   -- that of the agents; None for one node
    """

    def __init__(self, configuration: Configuration, rank: int, job: str, secret: str, link: Link | None) -> None:
        self._configuration, self._rank, self._job, self._secret = configuration, rank, job, secret
        self._link = link
        self._directory = AgentDirectory()
        self._stopped = threading.Event()
        self._sidecar: own_sidecar.OwnSidecar | None = None
        self._thread = threading.Thread(target=self._run, name="ronde-workers", daemon=True)

    @property
    def path(self) -> pathlib.Path:
        """The directory, for the workers."""
        return self._directory.path

    def start(self) -> None:
        """Begins to wait for a worker."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the sidecar and removes the directory. Call it when the link is over, or for one node."""
        self._stopped.set()
        # A sidecar that is being started is ended by the thread.
        self._thread.join(own_sidecar.START_TIMEOUT_S)
        if self._sidecar is not None:
            own_sidecar.stop(self._sidecar)
        self._directory.remove()

    def _run(self) -> None:
        try:
            request = self._awaited()
            if request is None:
                return
            self._serve(self._local_sizes(request), request)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if self._stopped.is_set():
            return
        text = f"torchrun's agent of node {self._rank} cannot start a sidecar for its workers: {error}"
        self._directory.report_failure(text, getattr(error, "cause", "connect"))

    def _awaited(self) -> Request | None:
        while not self._stopped.wait(_POLL_INTERVAL_S):
            request = self._directory.request()
            if request is not None:
                return request
        return None

    def _local_sizes(self, request: Request) -> list[int]:
        """Returns the number of workers of each node, when workers of all nodes have asked."""
        if self._link is None:
            return [request.local_size]
        link, nodes = self._link, self._configuration.nodes
        keys = [f"{_KEY}/{node}" for node in range(len(nodes))]
        link.submit(Operation("set", keys[self._rank], str(request.local_size).encode()), _SIZES_TIMEOUT_S)

        def report(missing: list[str]) -> None:
            ranks = [keys.index(key) for key in missing]
            names = ", ".join(f"{rank} ({nodes[rank]})" for rank in ranks)
            self._directory.report_wait(f"no worker of node {names} has begun a session; the output there explains why")

        until_all(link, keys, _SIZES_TIMEOUT_S, report)
        values = link.values()
        return [int(values[key]) for key in keys]

    def _serve(self, local_sizes: list[int], request: Request) -> None:
        _check(local_sizes, request)
        file = None
        if self._link is not None:
            file = self._directory.write_secret(f"{_SECRET_HEADER}\n{self._secret}\n")
        self._sidecar = sidecars.for_workers(self._configuration, self._rank, local_sizes, self._job, file)
        if self._stopped.is_set():
            own_sidecar.stop(self._sidecar)
        else:
            self._directory.answer(self._sidecar.socket, self._job)


def _check(local_sizes: list[int], request: Request) -> None:
    """Raises RondeError unless sidecars can serve these workers."""
    if sum(local_sizes) != request.size:
        raise RondeError(
            f"the nodes have {', '.join(map(str, local_sizes))} workers, but WORLD_SIZE is {request.size}: a program "
            "has changed LOCAL_WORLD_SIZE or WORLD_SIZE, which torchrun sets",
            "settings",
        )
    most = max(local_sizes)
    if most > own_sidecar.LOCAL_RANKS_MAX or min(local_sizes) < 1:
        raise RondeError(
            f"a node has {most} workers, and a sidecar serves 1 to {own_sidecar.LOCAL_RANKS_MAX}; use more nodes, or "
            f"start the program with `ronde run -np {request.size} --sidecars N COMMAND`",
            "settings",
        )
