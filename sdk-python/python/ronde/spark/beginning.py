"""Begins a job among the tasks of a barrier stage: a sidecar on each host, and the numbers of each rank."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, TypeVar

from ronde import _ronde, handles
from ronde.cluster import credentials, planning, sidecars
from ronde.cluster.credentials import Credentials
from ronde.cluster.layout import Layout, Place, by_node
from ronde.errors import RondeError
from ronde.processes import HostIdentity, own_host

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ronde.spark.exchange import Exchange
    from ronde.spark.plan import RunPlan

Value = TypeVar("Value")


class Begun(NamedTuple):
    """What a task knows of the job that has begun.

    rank      -- its rank
    layout    -- where all ranks run
    variables -- by which its rank finds its sidecar and its numbers
    """

    rank: int
    layout: Layout
    variables: Mapping[str, str]

    def described(self) -> str:
        """Returns the rank and its place, for messages."""
        return f"rank {self.rank} of {len(self.layout.places)} on {self.layout.places[self.rank].described()}"


def place_of(context: Any) -> Place:
    """Returns where a task runs.

    context -- its `pyspark.BarrierTaskContext`
    """
    address = context.getTaskInfos()[context.partitionId()].address.rpartition(":")[0].strip("[]")
    gpu = context.resources().get("gpu")
    gpus = () if gpu is None else tuple(map(str, gpu.addresses))
    return Place("", os.environ.get(handles.ADDRESS) or address, own_host(), os.geteuid(), os.getpid(), gpus)


def begin(plan: RunPlan, exchange: Exchange, partition: int, place: Place) -> Begun:
    """Starts the sidecars, and returns the rank of this task. All tasks call it.

    Raises RondeError with cause "settings" if the hosts have no credentials or different releases of ronde, and
    "connect" if a sidecar cannot be started; TimedOutError if a task does not answer. All tasks raise the same.
    """
    release = _ronde.__version__
    gathered = exchange.gather({**asdict(place), "release": release}, "where they run")
    releases = {each.pop("release") for each in gathered}
    places = [_place(each) for each in gathered]
    if len(releases) > 1:
        raise RondeError(
            f"the executors have the releases {', '.join(sorted(releases))} of ronde; install one on all hosts",
            "settings",
        )
    order = by_node(places)
    layout = Layout(places).reordered(order)
    rank = order.index(partition)
    planning.check_sizes(layout)
    with _environment(plan.variables):
        plans = _plans(plan, exchange, layout, rank)
        served = _served(exchange, layout, rank, plans)
    mine = served[layout.placement()[rank]]
    variables = planning.variables(layout, rank, mine, _options(plan, exchange))
    return Begun(rank, layout, variables)


def _place(fields: dict[str, Any]) -> Place:
    return Place(**{**fields, "host": HostIdentity(*fields["host"]), "gpus": tuple(fields["gpus"])})


def _options(plan: RunPlan, exchange: Exchange) -> planning.Options:
    return planning.Options(exchange.remaining(), plan.credentials, plan.interfaces)


def _plans(plan: RunPlan, exchange: Exchange, layout: Layout, rank: int) -> list[sidecars.Plan]:
    """Returns the plan of each sidecar, in the order of the layout's sidecars."""
    job = f"spark-{plan.run_id}"
    if len(layout.sharing) == 1:
        return planning.plans(layout, job, Credentials(), [], _options(plan, exchange))
    used = _credentials_for(plan, layout)
    leads = [ranks[0] for ranks in layout.sharing]
    own: dict[str, Any] = {}
    if rank in leads:
        address = layout.places[rank].address
        own = _attempt(lambda: dict(zip(("address", "identity"), sidecars.reserve(address, used.certs))))
        if used == Credentials() and rank == 0:
            # Over connections of Spark that are encrypted and authenticated, and into no file but that of the sidecar.
            own["secret"] = credentials.drawn().secret
    by_rank = _by_rank(exchange.gather({"rank": rank, **own}, "addresses for sidecars"))
    reached = [_value(layout, by_rank[lead]) for lead in leads]
    if used == Credentials():
        used = Credentials(secret=by_rank[0]["secret"])
    addresses = [
        planning.Address(each["address"], None if each["identity"] is None else tuple(each["identity"]))
        for each in reached
    ]
    return planning.plans(layout, job, used, addresses, _options(plan, exchange))


def _credentials_for(plan: RunPlan, layout: Layout) -> Credentials:
    """Returns the credentials that the caller names; none if a secret can be drawn. Raises RondeError without a way."""
    if plan.credentials != Credentials() or plan.is_private:
        return plan.credentials
    names = ", ".join(sorted({f"{place.host.name} ({place.address})" for place in layout.places})[:8])
    raise RondeError(
        f"the {len(layout.places)} processes need {len(layout.sharing)} sidecars, on {names}, which have no "
        "credentials by which they could authenticate each other, and ronde sends no key over Spark's connections: "
        f"{plan.unprotected}. Give one of these: job_secret_file=PATH, a file with the same secret on all hosts "
        "(`ronde certs secret FILE`); certs=PATH, a directory on each host with its certificate (`ronde certs once`); "
        "or let Spark encrypt its connections, with spark.authenticate and either spark.ssl.rpc.enabled and a trust "
        "store (from Spark 4.0 on), or spark.network.crypto.enabled and spark.network.crypto.saslFallback=false, and "
        "ronde makes a secret for each job. docs/SPARK.md describes them",
        "settings",
    )


def _served(exchange: Exchange, layout: Layout, rank: int, plans: list[sidecars.Plan]) -> list[sidecars.Served]:
    """Starts the sidecar of this host, if this task is its first, and returns where all serve."""
    leads = [ranks[0] for ranks in layout.sharing]
    own: dict[str, Any] = {}
    if rank in leads:
        own = _attempt(lambda: {"served": asdict(sidecars.start(plans[leads.index(rank)]))})
    by_rank = _by_rank(exchange.gather({"rank": rank, **own}, "their sidecars"))
    found = [_value(layout, by_rank[lead])["served"] for lead in leads]
    # JSON's keys are texts.
    return [
        sidecars.Served(**{**each, "tokens": {int(worker): path for worker, path in each["tokens"].items()}})
        for each in found
    ]


def _attempt(call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what a call returns, or its failure for all tasks."""
    try:
        return call()
    except RondeError as error:
        return {"failure": str(error), "cause": error.cause}
    except OSError as error:
        return {"failure": str(error), "cause": "connect"}


def _value(layout: Layout, found: dict[str, Any]) -> dict[str, Any]:
    """Returns what a task has found. Raises RondeError if it has failed."""
    if "failure" in found:
        rank = found["rank"]
        raise RondeError(f"rank {rank} on {layout.places[rank].described()}: {found['failure']}", found["cause"])
    return found


def _by_rank(gathered: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    return {each["rank"]: each for each in gathered}


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for a block: the sidecar takes its options from them. Spark uses this process again later."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
