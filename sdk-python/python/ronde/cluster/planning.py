"""What each sidecar of a job is started with, and which variables each rank gets, from where the ranks run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from ronde import own_sidecar
from ronde.cluster.credentials import Credentials
from ronde.cluster.sidecars import Plan, Served
from ronde.errors import RondeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.cluster.layout import Layout

# Variables of an earlier job, or of another launcher, that would contradict those of this one.
WITHDRAWN = (
    "RONDE_WEB",
    "RONDE_ELASTIC",
    "RONDE_WORKER",
    "RONDE_NEW_WORKER",
    "RONDE_AGENT",
    "MASTER_ADDR",
    "MASTER_PORT",
)


@dataclass(frozen=True)
class Options:
    """What a job is begun with.

    timeout     -- seconds in which workers have to answer, and sidecars to reach each other
    credentials -- that the caller names
    interfaces  -- the networks that sidecars listen on; "" for all
    shares_gpus -- whether each worker sees the GPUs of all workers of its sidecar, in the order of local ranks
    """

    timeout: float
    credentials: Credentials = field(default_factory=Credentials)
    interfaces: str = ""
    shares_gpus: bool = False


class Address(NamedTuple):
    """Where the sidecar of a node is reached.

    reached_at -- HOST:PORT
    identity   -- the job and the index that the node's certificate names; None without certificates
    """

    reached_at: str
    identity: tuple[str, int] | None


def check_sizes(layout: Layout) -> None:
    """Raises RondeError with cause "settings" if a sidecar would have too many workers."""
    most = max(layout.sharing, key=len)
    if len(most) > own_sidecar.LOCAL_RANKS_MAX:
        raise RondeError(
            f"{len(most)} workers run on {layout.places[most[0]].described()}, and a sidecar serves at most "
            f"{own_sidecar.LOCAL_RANKS_MAX}; spread the workers over more nodes",
            "settings",
        )


def plans(layout: Layout, job: str, used: Credentials, addresses: Sequence[Address], options: Options) -> list[Plan]:
    """Returns the plan of each sidecar, in the order of the layout's sidecars.

    job       -- its name; certificates name another one
    used      -- by what sidecars authenticate each other
    addresses -- of the sidecars, in the same order; unused if there is only one

    Raises RondeError with cause "settings" if the certificates are not those of one job.
    """
    timeout = max(1, math.ceil(options.timeout))
    placement = layout.placement()
    if len(layout.sharing) == 1:
        return [Plan(job, 0, (), tuple(placement), used, timeout)]
    indices = list(range(len(layout.sharing)))
    if used.certs is not None:
        job, indices = _of_certificates(layout, addresses)
    peers = [""] * len(indices)
    for index, address in zip(indices, addresses):
        peers[index] = address.reached_at
    numbered = tuple(indices[each] for each in placement)
    return [Plan(job, index, tuple(peers), numbered, used, timeout, options.interfaces) for index in indices]


def _of_certificates(layout: Layout, addresses: Sequence[Address]) -> tuple[str, list[int]]:
    """Returns the job and the index of each sidecar as the nodes' certificates name them."""
    identities = [address.identity for address in addresses]
    assert all(identities)  # each worker was asked for its certificate
    jobs = sorted({identity[0] for identity in identities if identity})
    indices = [identity[1] for identity in identities if identity]
    if len(jobs) > 1 or sorted(indices) != list(range(len(indices))):
        found = "; ".join(
            f"{layout.places[ranks[0]].host.name}: sidecar {identity[1]} of job {identity[0]}"
            for ranks, identity in zip(layout.sharing, identities)
            if identity
        )
        raise RondeError(
            f"the certificates of the {len(indices)} nodes are not those of one job with the indices 0 to "
            f"{len(indices) - 1}: {found}. Give each node its own directory of one call of `ronde certs once "
            f"--sidecars 0-{len(indices) - 1}`; where the cluster may choose among more nodes, use job_secret_file "
            "instead",
            "settings",
        )
    return jobs[0], indices


def variables(layout: Layout, rank: int, served: Served, options: Options) -> dict[str, str]:
    """Returns the variables by which a rank finds its sidecar and its numbers."""
    place = layout.places[rank]
    found = {
        **layout.numbers(rank).variables(),
        "RONDE_JOB": served.job,
        "RONDE_SOCKET": served.socket,
        "RONDE_TOKEN_FILE": served.tokens[rank],
        "RONDE_SIDECAR_UID": str(served.user),
        "HOROVOD_HOSTNAME": place.host.name,
    }
    if options.shares_gpus:
        found["CUDA_VISIBLE_DEVICES"] = layout.gpus(rank)
    return found
