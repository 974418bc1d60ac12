"""Starts the sidecars of a node: that of torchrun's agent, and that of its workers."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import pathlib
import re
import socket
import time
from typing import TYPE_CHECKING

from ronde import _ronde, own_sidecar
from ronde.client import Client
from ronde.errors import RondeError
from ronde.torchrun.configuration import AGENT_PORTS, Configuration
from ronde.torchrun.link import Link, until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# The options of `ronde sidecar` whose variables agents' sidecars take.
_OF_AGENTS = (
    "CERTIFICATE_LIFE",
    "LISTEN",
    "LOG_FORMAT",
    "LOG_LEVEL",
    "LOG_WITHOUT_TIMESTAMP",
    "LOG_WITH_TIMESTAMP",
    "NETWORK_INTERFACES",
    "PEER_TIMEOUT",
    "TCP_CONGESTION",
    "TRANSPORT",
    "TRUST_DOMAIN",
)
# A sidecar that cannot link ends with the reason; its agent waits for that.
_LAST_WAIT_S = 5.0
_END_TIMEOUT_S = 2.0
_FOREVER_S = 1_000_000_000


def linked(configuration: Configuration, deadline: float) -> tuple[Link, int]:
    """Starts the sidecar of this node's agent, and waits until those of all nodes are linked and their agents attached.

    deadline -- of the monotonic clock

    Returns the link and the number of this node. Raises RondeError, whose text names nodes; with cause "settings" if
    another attempt is useless.
    """
    options = agent_options(configuration, until(deadline))
    sidecar = own_sidecar.start_at_ports(options, for_agents(os.environ), deadline, keeps_output=True)
    try:
        rank = _rank(configuration, sidecar)
        # The sidecar's own timeout for its links ends first, and names the node.
        client = attached(sidecar, rank, until(deadline) + _LAST_WAIT_S, _FOREVER_S)
    except RondeError as error:
        reason = own_sidecar.failure(sidecar, 0 if error.cause == "settings" else _END_TIMEOUT_S)
        own_sidecar.stop(sidecar)
        if reason is None:
            raise
        raise RondeError(reason, "connect") from error
    except BaseException:
        own_sidecar.stop(sidecar)
        raise
    return Link(client, sidecar, [str(node) for node in configuration.nodes]), rank


def attached(sidecar: own_sidecar.OwnSidecar, rank: int, start_timeout: float, operation_timeout: float) -> Client:
    """Returns the session of an agent with its sidecar, when the agents of all nodes have attached.

    start_timeout     -- seconds to wait for them
    operation_timeout -- seconds after which an operation fails

    Raises RondeError.
    """
    settings = {
        "RONDE_SOCKET": sidecar.socket,
        "RONDE_JOB": sidecar.job,
        "RONDE_RANK": rank,
        "RONDE_TOKEN_FILE": sidecar.tokens[rank],
        "RONDE_SIDECAR_UID": os.geteuid(),
        "RONDE_START_TIMEOUT": start_timeout,
        "RONDE_CONNECT_TIMEOUT": _LAST_WAIT_S,
        # Of the environment these are meant for workers.
        "RONDE_OPERATION_TIMEOUT": operation_timeout,
        "RONDE_TIMELINE": "DYNAMIC",
        "RONDE_RING": 0,
    }
    texts = {name: str(value) for name, value in settings.items()}
    return Client(_ronde.Session.connect(texts, False, f"ronde-torchrun {_ronde.__version__}"))


def agent_options(configuration: Configuration, timeout: float) -> list[str]:
    """Returns options of `ronde sidecar` for that of an agent.

    timeout -- seconds in which the sidecars of all nodes have to link
    """
    peers = ",".join(node.at(0) for node in configuration.nodes)
    options = ["--end-with-input", "--peers", peers, "--start-timeout", _whole(timeout), "--lanes", "1"]
    # Batches of operations are small.
    options += ["--arena-mb", "256"]
    if configuration.certs is not None:
        return [*options, "--certs", configuration.certs]
    assert configuration.job_secret_file is not None  # one of both, for several nodes
    rank = own_rank(configuration) if configuration.rank is None else configuration.rank
    secret = ["--job-secret-file", configuration.job_secret_file]
    return [*options, *secret, "--job", job_of(configuration.run_id), "--index", str(rank)]


def job_of(run_id: str) -> str:
    """Returns a job's name for the agents, from the ID that the user has given: names have no other letters."""
    readable = re.sub(r"[^a-z0-9_.-]", "-", run_id.lower())[:32]
    return f"torchrun-{readable}-{hashlib.sha256(run_id.encode()).hexdigest()[:12]}"


def own_rank(configuration: Configuration) -> int:
    """Returns the number of this node: that of the only entry of the endpoint with an address of this host.

    Raises RondeError with cause "settings" if none or several are.
    """
    own = [rank for rank, node in enumerate(configuration.nodes) if _is_own(node.host, node.port)]
    if len(own) == 1:
        return own[0]
    how = "none" if not own else f"nodes {', '.join(map(str, own))}"
    raise RondeError(
        f"of the nodes {', '.join(map(str, configuration.nodes))} in --rdzv-endpoint, {how} have an address of this "
        "host, so its number is not known; give it, from 0 in their order: --rdzv-conf node_rank=N or PET_NODE_RANK=N "
        "(torchrun does not pass --node-rank on)",
        "settings",
    )


def _is_own(host: str, port: int) -> bool:
    if host in (socket.gethostname(), socket.getfqdn()):
        return True
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                # Only an address of this host can be bound. Port 0: another process may have the node's port.
                probe.bind((address[0], 0, *address[2:]))
                return True
    return False


def _rank(configuration: Configuration, sidecar: own_sidecar.OwnSidecar) -> int:
    """Returns the number of this node: that in its certificate, which is its rank among the agents."""
    (rank,) = sidecar.tokens
    if configuration.rank not in (None, rank):
        raise RondeError(
            f"the certificate in {configuration.certs} is that of node {rank}, but this node's number is "
            f"{configuration.rank} (node_rank, PET_NODE_RANK); give this node's directory, or leave the number out",
            "settings",
        )
    return rank


def for_workers(
    configuration: Configuration, rank: int, local_sizes: Sequence[int], job: str, secret_file: pathlib.Path | None
) -> own_sidecar.OwnSidecar:
    """Starts the sidecar of this node's workers.

    local_sizes -- the number of workers of each node
    job         -- the name of their job
    secret_file -- the file with its secret; None for one node

    Raises RondeError that explains why it cannot be started.
    """
    deadline = time.monotonic() + configuration.timeout
    if secret_file is None:
        alone = ["--local-ranks", str(local_sizes[0]), "--job", job]
        return own_sidecar.start_at_ports(alone, own_sidecar.variables_alone(os.environ), deadline)
    placement = ",".join(str(node) for node, count in enumerate(local_sizes) for _ in range(count))
    options = ["--end-with-input", "--peers", ",".join(node.at(AGENT_PORTS) for node in configuration.nodes)]
    options += ["--placement", placement, "--job-secret-file", str(secret_file), "--job", job, "--index", str(rank)]
    # All agents start theirs at this time.
    options += ["--start-timeout", _whole(min(configuration.timeout, own_sidecar.START_TIMEOUT_S))]
    return own_sidecar.start_at_ports(options, own_sidecar.variables_with_peers(os.environ), deadline)


def for_agents(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment of an agent's sidecar."""
    names = [own_sidecar.PREFIX + name for name in _OF_AGENTS]
    return {
        name: value for name, value in variables.items() if name in names or not name.startswith(own_sidecar.PREFIX)
    }


def _whole(timeout: float) -> str:
    return str(min(max(math.ceil(timeout), 1), 86_400))
