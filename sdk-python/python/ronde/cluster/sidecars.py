"""What each worker does for the job: it starts the sidecar of its node, and takes the job's variables.

These functions run in the processes that Ray or Spark start on the nodes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ronde import handles, own_sidecar
from ronde.cluster import credentials
from ronde.frameworks import open_sessions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ronde.cluster.credentials import Credentials

_INTERFACES = f"{own_sidecar.PREFIX}NETWORK_INTERFACES"


@dataclass(frozen=True)
class Plan:
    """What the sidecar of a node is started with.

    job         -- the name of the job
    index       -- of the sidecar
    peers       -- the addresses of all sidecars, HOST:PORT; none if this is the only one
    placement   -- the index of each rank's sidecar
    credentials -- by which sidecars authenticate each other
    timeout     -- seconds in which the sidecars have to reach each other
    interfaces  -- the networks that sidecars listen on, as `--network-interfaces` takes them; "" for all
    """

    job: str
    index: int
    peers: tuple[str, ...]
    placement: tuple[int, ...]
    credentials: Credentials
    timeout: int
    interfaces: str = ""


@dataclass(frozen=True)
class Served:
    """Where a sidecar serves its workers.

    socket -- its session directory
    job    -- the name of its job
    user   -- the user ID of its process
    tokens -- for each rank that it serves, the path of the file with its token
    """

    socket: str
    job: str
    user: int
    tokens: Mapping[int, str]


class _Own:
    """The sidecar that this worker started for its node."""

    sidecar: own_sidecar.OwnSidecar | None = None


_own = _Own()


def reserve(address: str, certs: str | None) -> tuple[str, tuple[str, int] | None]:
    """Returns where other nodes reach the sidecar that this worker starts, and its job and index in its certificate.

    address -- of this node
    certs   -- the directory with the certificate; None without one

    Raises RondeError.
    """
    return handles.reserved_address(address), None if certs is None else credentials.of_certificate(certs)


def start(plan: Plan) -> Served:
    """Starts the sidecar of this node. It ends when this process does. Raises RondeError if it cannot be started."""
    stop()
    local_size = plan.placement.count(plan.index)
    if not plan.peers:
        alone = ["--local-ranks", str(local_size), "--job", plan.job]
        _own.sidecar = own_sidecar.start_with(alone, own_sidecar.variables_alone(os.environ))
    else:
        environment = own_sidecar.variables_with_peers(os.environ)
        if plan.interfaces:
            environment[_INTERFACES] = plan.interfaces
        peers = ["--end-with-input", "--peers", ",".join(plan.peers), "--start-timeout", str(plan.timeout)]
        peers += ["--placement", ",".join(map(str, plan.placement))]
        with credentials.options(plan.credentials, plan.index, plan.job) as authenticated:
            _own.sidecar = own_sidecar.start_with([*peers, *authenticated], environment, plan.timeout)
    started = _own.sidecar
    return Served(started.socket, started.job, os.geteuid(), started.tokens)


def join(variables: Mapping[str, str], withdrawn: tuple[str, ...] = ()) -> None:
    """Takes the job's variables into this process's environment.

    withdrawn -- variables that this process must not have
    """
    for name in withdrawn:
        os.environ.pop(name, None)
    os.environ.update(variables)


def leave() -> None:
    """Ends this process's sessions of ronde and the sidecar that it started."""
    try:
        open_sessions.end_all()
    finally:
        stop()


def stop(waits: bool = True) -> None:
    """Stops the sidecar that this process started, if it did.

    waits -- whether to wait for its exit
    """
    started, _own.sidecar = _own.sidecar, None
    if started is not None:
        own_sidecar.stop(started, waits)
