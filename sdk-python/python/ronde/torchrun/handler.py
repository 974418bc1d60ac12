"""The rendezvous of torchrun's agents: `torchrun --rdzv-backend ronde`.

Nodes and their order are fixed by the options. Each start of the workers has its own session of the agents, over
sidecars that authenticate each other; its beginning is the meeting. An agent that starts its workers again leaves the
session, which ends it for the others, and all meet in the next one.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import secrets
import socket
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.utils.logging import get_logger

from ronde import _ronde, agent_directory
from ronde.errors import RondeError
from ronde.torchrun import configuration as options
from ronde.torchrun import sidecars
from ronde.torchrun.link import Link, until
from ronde.torchrun.replica import CLOSES, RESTARTS
from ronde.torchrun.store import AgentStore
from ronde.torchrun.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.torchrun.configuration import Configuration, Node

BACKEND = "ronde"
# Between two attempts to meet, as an agent of an earlier start may still be there.
_RETRY_S = 1.0
_HELLO_BYTES_MAX = 64 << 10
_SECRET_DIGITS = 64
_logger = get_logger(__name__)


class Hello(NamedTuple):
    """What each agent sends first. Job, secret and port are those of node 0.

    release -- of ronde
    run_id  -- the job's ID
    nodes   -- the nodes in their order
    job     -- the name of the workers' job
    secret  -- its secret
    port    -- a free port of the node, for the store of backends other than ronde
    """

    release: str
    run_id: str
    nodes: tuple[str, ...]
    job: str
    secret: str
    port: int


class Handler(RendezvousHandler):
    """The rendezvous handler of one agent."""

    def __init__(self, configuration: Configuration) -> None:
        self._configuration = configuration
        self._round = configuration  # of this start of the workers: its nodes, and the number of this one among them
        self._link: Link | None = None
        self._workers: Workers | None = None
        self._closed: str | None = None

    def get_backend(self) -> str:
        """Returns "ronde"."""
        return BACKEND

    def get_run_id(self) -> str:
        """Returns the ID of the job."""
        return self._configuration.run_id

    @property
    def use_agent_store(self) -> bool:
        """False: no store is served to the workers."""
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """Meets the agents of all other nodes.

        Raises RendezvousTimeoutError that names a node that is missing, RendezvousClosedError if a node has left the
        job, RendezvousStateError if options differ between nodes, and RendezvousConnectionError.
        """
        self._end(RESTARTS)
        if self._closed is not None:
            raise RendezvousClosedError(self._closed)
        if not self._configuration.nodes:
            store: Store = HashStore()
            rank, hello, host = 0, self._hello(), "127.0.0.1"
        else:
            self._link, rank, hello = self._met()
            store, host = AgentStore(self._link), self._round.nodes[0].host
        self._workers = Workers(self._round, rank, hello.job, hello.secret, self._link)
        self._workers.start()
        # Workers inherit it.
        os.environ[agent_directory.VARIABLE] = str(self._workers.path)
        store.set_timeout(datetime.timedelta(seconds=self._configuration.timeout))
        return RendezvousInfo(store, rank, self._round.size, RendezvousStoreInfo(host, hello.port))

    def is_closed(self) -> bool:
        """Returns whether this agent, or another one, has left the job."""
        self._note_left()
        return self._closed is not None

    def set_closed(self) -> None:
        """Leaves the job: agents do not meet again."""
        self._closed = self._closed or "this agent has closed the rendezvous"

    def num_nodes_waiting(self) -> int:
        """Returns 1 if another agent starts its workers again and waits for this one, else 0."""
        left = None if self._link is None else self._link.left()
        return 1 if left is not None and left[1] == RESTARTS else 0

    def shutdown(self) -> bool:
        """Leaves the job and stops the sidecars."""
        self._end(CLOSES)
        self.set_closed()
        return True

    def _end(self, reason: str) -> None:
        """Ends this start of the workers: their sidecar, and the session of the agents."""
        workers, self._workers = self._workers, None
        link = self._link
        try:
            if link is not None:
                link.end(reason)
                self._note_left()
        finally:
            self._link = None
            if workers is not None:
                workers.stop()
            os.environ.pop(agent_directory.VARIABLE, None)

    def _note_left(self) -> None:
        left = None if self._link is None else self._link.left()
        if left is not None and left[1] == CLOSES and self._closed is None:
            node = described(left[0], self._round.nodes)
            self._closed = f"the agent of {node} has ended its workers and left the job"

    # === The meeting of several nodes ===

    def _met(self) -> tuple[Link, int, Hello]:
        deadline = time.monotonic() + self._configuration.timeout
        reported = None
        while True:
            try:
                return attempt(self._configuration, self._hello(), deadline)
            except RondeError as error:
                text = named(str(error), self._configuration.nodes)
                if error.cause == "settings":
                    raise RendezvousConnectionError(text) from error
                if until(deadline) < _RETRY_S:
                    raise RendezvousTimeoutError(self._missing(text)) from error
            if text != reported:
                _logger.warning("the agents have not met yet, and try again: %s", text)
                reported = text
            time.sleep(_RETRY_S)

    def _missing(self, text: str) -> str:
        nodes = ", ".join(map(str, self._configuration.nodes))
        return (
            f"the agents of {self._configuration.size} nodes ({nodes}) have not met within "
            f"{self._configuration.timeout:.0f} s: {text}. Start torchrun on each node, with the same options; if a "
            "node only needs more time, give --rdzv-conf timeout=SECONDS"
        )

    def _hello(self) -> Hello:
        nodes = tuple(map(str, self._round.nodes))
        job, secret = f"torchrun-{secrets.token_hex(6)}", secrets.token_hex(_SECRET_DIGITS // 2)
        return Hello(_ronde.__version__, self._configuration.run_id, nodes, job, secret, _free_port())


def create(parameters: RendezvousParameters) -> Handler:
    """Returns the handler for these options. Raises ValueError that names the option that is wrong."""
    configuration = options.read(parameters, os.environ)
    if configuration.nodes_min is None:
        return Handler(configuration)
    from ronde.torchrun.rounds import RoundsHandler

    return RoundsHandler(configuration)


def attempt(configuration: Configuration, hello: Hello, deadline: float) -> tuple[Link, int, Hello]:
    """Tries to meet the agents of all nodes of a configuration once.

    Returns their link, the number of this node, and the hello of node 0. Raises RondeError, whose text has numbers of
    sidecars and ranks, and RendezvousStateError if options differ between nodes.
    """
    link, rank = sidecars.linked(configuration, deadline)
    try:
        first = _greeted(link, hello, configuration.nodes)
    except BaseException:
        link.end(RESTARTS)
        raise
    link.start()
    return link, rank, first


def _greeted(link: Link, mine: Hello, nodes: Sequence[Node]) -> Hello:
    """Exchanges hellos and returns that of node 0. Raises RendezvousStateError if they do not fit together."""
    problem = None
    parts = link.gather(json.dumps(mine).encode(), "hello")
    try:
        hellos = [_hello(part, node, nodes) for node, part in enumerate(parts)]
        _check_same(hellos, nodes)
    except RendezvousStateError as error:
        problem = error
    # All have the hellos, and so the same problem, before the first one leaves.
    try:
        link.barrier("hello.end")
    except RondeError:
        if problem is None:
            raise
    if problem is not None:
        raise problem
    return hellos[0]


def described(number: int, nodes: Sequence[Node]) -> str:
    """Returns a node's name for a message, by its number among some nodes."""
    node = nodes[number]
    return f"node {node}" if node.named else f"node {number} ({node})"


def named(text: str, nodes: Sequence[Node]) -> str:
    """Returns a message about sidecars and ranks of the agents with the nodes that they are."""

    def name(match: re.Match[str]) -> str:
        numbers = [int(number) for number in re.findall(r"\d+", match[2])]
        known = [described(number, nodes).partition(" ")[2] for number in numbers if number < len(nodes)]
        return f"node {', '.join(known)}" if len(known) == len(numbers) else match[0]

    # Each agent is the only rank of its sidecar.
    text = re.sub(r"\brank (\d+) on sidecar \1\b", r"sidecar \1", text)
    return re.sub(r"\b(sidecar|ranks?) (\d+(?:, \d+)*)\b", name, text)


def _hello(data: bytes, node: int, nodes: Sequence[Node]) -> Hello:
    """Parses what another agent has sent. Raises RendezvousStateError if it is no hello of this release."""
    try:
        if len(data) > _HELLO_BYTES_MAX:
            raise ValueError("it is too long")
        release, run_id, others, job, secret, port = json.loads(data)
        hello = Hello(str(release), str(run_id), tuple(map(str, others)), str(job), str(secret), int(port))
        if not re.fullmatch(r"[0-9a-f]{64}", hello.secret) or not re.fullmatch(r"torchrun-[0-9a-f]+", hello.job):
            raise ValueError("its job has no valid name or secret")
    except (TypeError, ValueError, RecursionError) as error:
        raise RendezvousStateError(
            f"the agent of node {node} ({nodes[node]}) sent a message that this one cannot read ({error}); install one "
            "release of ronde on all nodes"
        ) from error
    return hello


def _check_same(hellos: Sequence[Hello], nodes: Sequence[Node]) -> None:
    """Raises RendezvousStateError if the nodes have different options."""
    first = hellos[0]
    for node, hello in enumerate(hellos):
        for what, theirs, mine in [
            ("release of ronde", hello.release, first.release),
            ("--rdzv-id", hello.run_id, first.run_id),
            ("--rdzv-endpoint", ",".join(hello.nodes), ",".join(first.nodes)),
        ]:
            if theirs != mine:
                raise RendezvousStateError(
                    f"{what} is {theirs!r} on node {node} ({nodes[node]}), but {mine!r} on node 0 ({nodes[0]}); give "
                    "all nodes the same"
                )


def _free_port() -> int:
    """Returns a TCP port that is free now. Nothing listens there, unless a program opens PyTorch's store itself."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: Any = probe.getsockname()[1]
        return int(port)
