"""Begins a job among workers of Ray: a sidecar on each node, and the job's variables in each worker."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from typing import TYPE_CHECKING, Any, Callable

import ray

from ronde import own_sidecar
from ronde.cluster import planning, sidecars
from ronde.cluster.credentials import Credentials, drawn, in_file
from ronde.errors import RondeError, TimedOutError
from ronde.processes import own_host
from ronde.ray.nodes import describe, uses_tls

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ronde.cluster.layout import Layout, Place
    from ronde.cluster.planning import Options

    # Calls a function with arguments on the worker of a rank, and returns Ray's reference to its result.
    Caller = Callable[..., Any]

_NAMED_MAX = 8


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
    planning.check_sizes(layout)
    leads = [ranks[0] for ranks in layout.sharing]
    with _credentials_for(call, layout, options.credentials, deadline) as used:
        plans = _plans(call, layout, used, options, deadline)
        served: list[sidecars.Served] = gathered(
            [call(lead, sidecars.start, plan) for lead, plan in zip(leads, plans)],
            deadline - time.monotonic(),
            "have not started a sidecar",
            _names(layout, leads),
        )
    everyone = range(len(layout.places))
    joined = [
        call(rank, sidecars.join, planning.variables(layout, rank, served[index], options), planning.WITHDRAWN)
        for rank, index in zip(everyone, layout.placement())
    ]
    gathered(
        joined, max(deadline - time.monotonic(), 1.0), "have not taken the job's variables", _names(layout, everyone)
    )


def gathered(references: Sequence[Any], timeout: float, what: str, name: Callable[[int], str]) -> list[Any]:
    """Returns the results of calls.

    what -- for the message: what the missing ones have not done
    name -- names the worker of a call

    Raises RondeError with cause "rank_lost" if a worker has ended, otherwise TimedOutError that names the workers that
    have not answered, or RondeError of the first call that failed.
    """
    _, missing = ray.wait(list(references), num_returns=len(references), timeout=max(timeout, 0.0))
    # Calls on other workers may fail, or wait, because this one has ended.
    if (found := lost(references, missing)) is not None:
        index, ended = found
        raise RondeError(f"{name(index)} has ended: {ended}", "rank_lost") from ended
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
    return results


def lost(references: Sequence[Any], missing: Sequence[Any]) -> tuple[int, Exception] | None:
    """Returns the index of the first call whose worker has ended, with Ray's error; None if there is none.

    missing -- references without a result
    """
    for index, reference in enumerate(references):
        if reference in missing:
            continue
        try:
            ray.get(reference)
        except ray.exceptions.RayTaskError:
            # The function has failed, also if that was about an actor of its own: a RayActorError, too.
            continue
        except ray.exceptions.RayActorError as error:
            return index, error
    return None


def _worker(index: int) -> str:
    return f"worker {index}"


def _names(layout: Layout, ranks: Sequence[int]) -> Callable[[int], str]:
    """Returns what names a call's worker: its rank and place."""
    return lambda index: f"rank {ranks[index]} ({layout.places[ranks[index]].described()})"


def _plans(call: Caller, layout: Layout, used: Credentials, options: Options, deadline: float) -> list[sidecars.Plan]:
    """Returns the plan of each sidecar, in the order of the layout's sidecars."""
    addresses: list[planning.Address] = []
    if len(layout.sharing) > 1:
        leads = [ranks[0] for ranks in layout.sharing]
        calls = [call(lead, sidecars.reserve, layout.places[lead].address, used.certs) for lead in leads]
        reached = gathered(calls, deadline - time.monotonic(), "have not reserved ports", _names(layout, leads))
        addresses = [planning.Address(*each) for each in reached]
    return planning.plans(layout, f"ray-{secrets.token_hex(6)}", used, addresses, options)


@contextlib.contextmanager
def _credentials_for(call: Caller, layout: Layout, given: Credentials, deadline: float) -> Iterator[Credentials]:
    """Yields the credentials of a job whose workers run as the layout says; the sidecars start within the block.

    Raises RondeError with cause "settings" if there are several sidecars and no way to authenticate them.
    """
    if len(layout.sharing) == 1:
        yield Credentials()
    elif given != Credentials():
        yield given
    elif uses_tls() and all(place.has_tls for place in layout.places):
        yield drawn()
    elif _are_of_this_user_here(layout):
        # Nodes of one host, such as those of ray.cluster_utils: the secret needs no connection to reach them.
        with in_file(drawn()) as path:
            leads = [ranks[0] for ranks in layout.sharing]
            calls = [call(lead, os.path.exists, path) for lead in leads]
            rest = deadline - time.monotonic()
            if not all(gathered(calls, rest, "have not looked for the file of the secret", _names(layout, leads))):
                raise _without_credentials(layout)  # containers with directories of their own
            yield Credentials(secret_file=path)
    else:
        raise _without_credentials(layout)


def _are_of_this_user_here(layout: Layout) -> bool:
    host, user = own_host(), os.geteuid()
    return all(place.host.is_same(host) and place.user == user for place in layout.places)


def _without_credentials(layout: Layout) -> RondeError:
    names = ", ".join(sorted({f"{place.host.name} ({place.address})" for place in layout.places})[:8])
    return RondeError(
        f"the {len(layout.places)} workers need {len(layout.sharing)} sidecars, on {names}, which have no credentials "
        "by which they could authenticate each other. Ray's connections are plaintext, so ronde sends no key over "
        "them. Give one of these: job_secret_file=PATH, a file with the same secret on all nodes (`ronde certs secret "
        "FILE`); certs=PATH, a directory on each node with its certificate (`ronde certs once`); or start Ray with "
        "RAY_USE_TLS=1 on all nodes and the driver, and ronde makes a secret for each job. docs/RAY.md describes them",
        "settings",
    )
