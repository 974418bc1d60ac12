"""Begins a job among workers of Ray: a sidecar on each node, and the job's variables in each worker."""

from __future__ import annotations

import math
import secrets
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import ray

from ronde import own_sidecar
from ronde.errors import RondeError, TimedOutError
from ronde.ray import credentials, sidecars
from ronde.ray.credentials import Credentials
from ronde.ray.nodes import Layout, Place, describe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    # Calls a function with arguments on the worker of a rank, and returns Ray's reference to its result.
    Caller = Callable[..., Any]

# Variables of an earlier job, or of another launcher, that would contradict those of this one.
_WITHDRAWN = (
    "RONDE_WEB",
    "RONDE_ELASTIC",
    "RONDE_WORKER",
    "RONDE_NEW_WORKER",
    "RONDE_AGENT",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_NAMED_MAX = 8


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


class _Address(NamedTuple):
    reached_at: str
    identity: tuple[str, int] | None


def places(call: Caller, count: int, timeout: float) -> list[Place]:
    """Returns where the workers run. Raises TimedOutError that names those that do not answer."""
    return gathered([call(worker, describe) for worker in range(count)], timeout, "have not started", _worker)


def begin(call: Caller, layout: Layout, options: Options) -> None:
    """Starts a sidecar on each node, and gives each worker the variables of its rank.

    call   -- calls a function on the worker of a rank
    layout -- where the ranks run

    Raises RondeError with cause "settings" if the nodes have no credentials, and "connect" if a sidecar cannot be
    started; TimedOutError if a worker does not answer.
    """
    deadline = time.monotonic() + options.timeout + own_sidecar.START_TIMEOUT_S
    _check_sizes(layout)
    plans = _plans(call, layout, options, deadline)
    leads = [ranks[0] for ranks in layout.sharing]
    served: list[sidecars.Served] = gathered(
        [call(lead, sidecars.start, plan) for lead, plan in zip(leads, plans)],
        deadline - time.monotonic(),
        "have not started a sidecar",
        _names(layout, leads),
    )
    everyone = range(len(layout.places))
    joined = [
        call(rank, sidecars.join, _variables(layout, rank, served[index], options), _WITHDRAWN)
        for rank, index in zip(everyone, layout.placement())
    ]
    gathered(
        joined, max(deadline - time.monotonic(), 1.0), "have not taken the job's variables", _names(layout, everyone)
    )


def gathered(references: Sequence[Any], timeout: float, what: str, name: Callable[[int], str]) -> list[Any]:
    """Returns the results of calls. Raises the first failure, or TimedOutError that names those that are missing.

    what -- for the message: what the missing ones have not done
    name -- names the worker of a call
    """
    _, missing = ray.wait(list(references), num_returns=len(references), timeout=max(timeout, 0.0))
    late = [index for index, reference in enumerate(references) if reference in missing]
    if late:
        names = ", ".join(name(index) for index in late[:_NAMED_MAX])
        more = f" and {len(late) - _NAMED_MAX} more" if len(late) > _NAMED_MAX else ""
        raise TimedOutError(
            f"{names}{more} of {len(references)} {what} within {timeout:.0f} s; Ray's logs of these workers say why. "
            "If they only need more time, raise timeout_s",
            "start",
        )
    results = []
    for index, reference in enumerate(references):
        try:
            results.append(ray.get(reference))
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, RondeError) else None
            raise RondeError(f"{name(index)}: {cause or error}", cause.cause if cause else "connect") from error
        except ray.exceptions.RayActorError as error:
            raise RondeError(f"{name(index)} has ended: {error}", "rank_lost") from error
    return results


def _worker(index: int) -> str:
    return f"worker {index}"


def _names(layout: Layout, ranks: Sequence[int]) -> Callable[[int], str]:
    """Returns what names a call's worker: its rank and place."""
    return lambda index: f"rank {ranks[index]} ({layout.places[ranks[index]].described()})"


def _check_sizes(layout: Layout) -> None:
    most = max(layout.sharing, key=len)
    if len(most) > own_sidecar.LOCAL_RANKS_MAX:
        raise RondeError(
            f"{len(most)} workers run on {layout.places[most[0]].described()}, and a sidecar serves at most "
            f"{own_sidecar.LOCAL_RANKS_MAX}; spread the workers over more nodes (num_hosts, num_workers_per_host)",
            "settings",
        )


def _plans(call: Caller, layout: Layout, options: Options, deadline: float) -> list[sidecars.Plan]:
    """Returns the plan of each sidecar, in the order of the layout's sidecars."""
    used = credentials.for_nodes(layout, options.credentials)
    job = f"ray-{secrets.token_hex(6)}"
    timeout = max(1, math.ceil(options.timeout))
    placement = layout.placement()
    if len(layout.sharing) == 1:
        return [sidecars.Plan(job, 0, (), tuple(placement), used, timeout)]
    leads = [ranks[0] for ranks in layout.sharing]
    calls = [call(lead, sidecars.reserve, layout.places[lead].address, used.certs) for lead in leads]
    reached = gathered(calls, deadline - time.monotonic(), "have not reserved ports", _names(layout, leads))
    addresses = [_Address(*each) for each in reached]
    if used.certs is not None:
        job, indices = _of_certificates(layout, addresses)
    else:
        indices = list(range(len(leads)))
    peers = [""] * len(leads)
    for index, address in zip(indices, addresses):
        peers[index] = address.reached_at
    numbered = tuple(indices[each] for each in placement)
    return [sidecars.Plan(job, index, tuple(peers), numbered, used, timeout, options.interfaces) for index in indices]


def _of_certificates(layout: Layout, addresses: Sequence[_Address]) -> tuple[str, list[int]]:
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
            f"--sidecars 0-{len(indices) - 1}`; where Ray may choose among more nodes, use job_secret_file instead",
            "settings",
        )
    return jobs[0], indices


def _variables(layout: Layout, rank: int, served: sidecars.Served, options: Options) -> Mapping[str, str]:
    place = layout.places[rank]
    variables = {
        **layout.numbers(rank).variables(),
        "RONDE_JOB": served.job,
        "RONDE_SOCKET": served.socket,
        "RONDE_TOKEN_FILE": served.tokens[rank],
        "RONDE_SIDECAR_UID": str(served.user),
        "HOROVOD_HOSTNAME": place.host.name,
    }
    if options.shares_gpus:
        variables["CUDA_VISIBLE_DEVICES"] = layout.gpus(rank)
    return variables
