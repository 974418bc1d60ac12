"""The options of `torchrun --rdzv-backend ronde`, checked before anything is started."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.distributed.elastic.rendezvous import RendezvousParameters

PORT = 7400
_PORT_MAX = 65_535
# The first port is that of the agents' sidecars; they have one lane, at the second.
AGENT_PORTS = 2
_KEYS = ("certs", "job_secret_file", "node_rank", "join_timeout", "timeout", "last_call_timeout")
_TIMEOUT_S = 900
_LAST_CALL_S = 30
# Nodes that come and go: each has a sidecar for each other one.
RANGE_NODES_MAX = 16
# Their ports after the first one: two for each other node, then four times those of a start of the workers.
PORTS_OF_PAIRS = 2 * RANGE_NODES_MAX
PORTS_OF_ROUND, ROUNDS = 16, 4
PORTS_OF_RANGE = PORTS_OF_PAIRS + ROUNDS * PORTS_OF_ROUND
_ENDPOINT = "--rdzv-endpoint alpha:7400,beta:7400"
_WAYS = (
    "--rdzv-conf job_secret_file=FILE, the same secret on all nodes (`ronde certs secret FILE`), or --rdzv-conf "
    "certs=DIR, a directory for each node (`ronde certs issue`); docs/KEYS.md describes both"
)


@dataclasses.dataclass(frozen=True)
class Node:
    """A node as the endpoint names it.

    host  -- a name or an address
    port  -- the first of its ports
    named -- its number and address in the endpoint, for messages, where these are others
    """

    host: str
    port: int
    named: str = ""

    def __str__(self) -> str:
        return self.named or self.at(0)

    def at(self, offset: int) -> str:
        """Returns HOST:PORT for a port after the first one; an IPv6 address is in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port + offset}"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """What the options ask for.

    run_id          -- the job's ID (--rdzv-id)
    nodes           -- all nodes, in their order; empty for one node
    rank            -- the number of this node among them; None if no option gives it
    timeout         -- how long nodes wait for each other, in seconds
    nodes_min       -- of nodes that come and go, how many the job needs; None for a job of all nodes
    last_call       -- how long a job that has enough nodes waits for more, in seconds
    certs           -- the directory with the certificate of this node
    job_secret_file -- the file with the secret of all nodes; exactly one of both, for several nodes
    """

    run_id: str
    nodes: tuple[Node, ...] = ()
    rank: int | None = None
    timeout: float = _TIMEOUT_S
    certs: str | None = None
    job_secret_file: str | None = None
    nodes_min: int | None = None
    last_call: float = _LAST_CALL_S

    @property
    def size(self) -> int:
        """The number of nodes."""
        return max(len(self.nodes), 1)

    def part(self, run_id: str, offsets: Mapping[int, int], me: int) -> Configuration:
        """Returns the configuration of some nodes, numbered among themselves, which keep their names in messages.

        run_id  -- of their agents
        offsets -- of each node, by its number, the offset of its first port
        me      -- the number of this node
        """
        numbers = sorted(offsets)
        nodes = tuple(self._shifted(number, offsets[number]) for number in numbers)
        return dataclasses.replace(self, run_id=run_id, nodes=nodes, rank=numbers.index(me))

    def _shifted(self, number: int, offset: int) -> Node:
        node = self.nodes[number]
        return Node(node.host, node.port + offset, f"{number} ({node})")


def read(parameters: RendezvousParameters, environment: Mapping[str, str]) -> Configuration:
    """Returns what the options ask for. Raises ValueError that names the option and what to write instead.

    environment -- variables; PET_NODE_RANK, RONDE_SIDECAR_CERTS and RONDE_SIDECAR_JOB_SECRET_FILE stand in for options
    """
    options = {key: str(value) for key, value in parameters.config.items()}
    unknown = sorted(set(options) - set(_KEYS))
    if unknown:
        raise ValueError(
            f"--rdzv-conf has {', '.join(unknown)}, which --rdzv-backend ronde does not have; it has {', '.join(_KEYS)}"
        )
    timeout = _seconds(options, "join_timeout" if "join_timeout" in options else "timeout", _TIMEOUT_S)
    nodes = _nodes(parameters.endpoint or "", parameters.max_nodes)
    if not nodes:
        return Configuration(parameters.run_id, timeout=timeout)
    certs, secret = _credentials(options, environment)
    rank = _rank(options, environment, len(nodes))
    fixed = Configuration(parameters.run_id, nodes, rank, timeout, certs, secret)
    return fixed if parameters.min_nodes == parameters.max_nodes else _range(fixed, parameters.min_nodes, options)


def _range(fixed: Configuration, nodes_min: int, options: Mapping[str, str]) -> Configuration:
    """Returns the configuration of nodes that come and go."""
    if fixed.certs is not None:
        raise ValueError(
            f"--nnodes {nodes_min}:{fixed.size} is a range, so nodes have other numbers in each round, but the "
            f"certificates in {fixed.certs} have fixed ones; give --rdzv-conf job_secret_file=FILE instead"
        )
    if fixed.size > RANGE_NODES_MAX:
        raise ValueError(
            f"--nnodes {nodes_min}:{fixed.size}: of nodes that come and go there are at most {RANGE_NODES_MAX}, "
            "because each has a sidecar for each other one; give a smaller range, or one number"
        )
    if any(node.port > _PORT_MAX - PORTS_OF_RANGE for node in fixed.nodes):
        raise ValueError(f"nodes that come and go use {PORTS_OF_RANGE} ports each; give lower ones in --rdzv-endpoint")
    last_call = _seconds(options, "last_call_timeout", _LAST_CALL_S)
    return dataclasses.replace(fixed, nodes_min=nodes_min, last_call=last_call)


def _nodes(endpoint: str, count: int) -> tuple[Node, ...]:
    """Returns the nodes of the endpoint; none for a job of one node, which needs no address."""
    entries = [entry.strip() for entry in endpoint.split(",") if entry.strip()]
    if count == 1 and len(entries) <= 1:
        return ()
    nodes = tuple(_node(entry) for entry in entries)
    if len(nodes) != count:
        raise ValueError(
            f"--rdzv-endpoint {endpoint!r} names {len(nodes)} nodes, but --nnodes is {count}. Name each node once, in "
            f"the same order on all of them: {_ENDPOINT}"
        )
    if len(set(nodes)) != count:
        raise ValueError(f"--rdzv-endpoint {endpoint!r} names a node twice; give each its own address and port")
    return nodes


def _node(entry: str) -> Node:
    match = re.fullmatch(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[^\s\[\]:,]+))(?::(?P<port>\d{1,5}))?", entry)
    port = PORT if match is None or match["port"] is None else int(match["port"])
    if match is None or not 0 < port <= _PORT_MAX - AGENT_PORTS:
        raise ValueError(
            f"--rdzv-endpoint has {entry!r}, which is not HOST:PORT. Name each node, an IPv6 address in brackets: "
            f"{_ENDPOINT}"
        )
    return Node(match["v6"] or match["name"], port)


def _credentials(options: Mapping[str, str], environment: Mapping[str, str]) -> tuple[str | None, str | None]:
    certs, secret = options.get("certs"), options.get("job_secret_file")
    if certs is None and secret is None:
        certs = environment.get("RONDE_SIDECAR_CERTS") or None
        secret = environment.get("RONDE_SIDECAR_JOB_SECRET_FILE") or None
    if certs is None and secret is None:
        raise ValueError(f"nodes need credentials by which they authenticate each other: {_WAYS}")
    if certs is not None and secret is not None:
        raise ValueError(f"there is a directory of certificates ({certs}) and a secret ({secret}); give one: {_WAYS}")
    return certs, secret


def _rank(options: Mapping[str, str], environment: Mapping[str, str], count: int) -> int | None:
    for name, text in [
        ("node_rank of --rdzv-conf", options.get("node_rank")),
        ("PET_NODE_RANK", environment.get("PET_NODE_RANK")),
    ]:
        if text:
            if not text.isdecimal() or int(text) >= count:
                raise ValueError(f"{name} is {text!r}; it is the number of this node, from 0 to {count - 1}")
            return int(text)
    return None


def _seconds(options: Mapping[str, Any], name: str, default: float) -> float:
    text = options.get(name, default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        raise ValueError(f"{name} of --rdzv-conf is {text!r}; it must be a number of seconds above 0, at most 86400")
    return seconds
