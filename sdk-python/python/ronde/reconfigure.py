"""Sessions of processes that know each other by handles, each with its own sidecars.

`reconfigure` of torch.distributed, `shrink_group` and torchft begin one for each world. On each host the process with
the lowest rank starts the sidecar, which ends with that process. The others of the host find it through a directory
that only their user can enter, and ask the kernel whether a process of their user serves it.

Sidecars of several hosts authenticate each other by the secret in RONDE_SIDECAR_JOB_SECRET_FILE. The job's name is a
digest of all handles in their order, and each certificate names the job: processes that were given different handles
do not get a connection. There is no other listener.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import math
import os
import pathlib
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ronde import handles, own_sidecar
from ronde.client import Client, connect
from ronde.errors import PeerLostError, RondeError, TimedOutError
from ronde.handles import Handle
from ronde.private_folder import DirectoryStore, PrivateFolder, own_base
from ronde.processes import identity_of, own_host
from ronde.rendezvous import Member, Sidecar, meet

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

# One rank for each handle.
_RANKS_MAX = 4096
_CONNECT_TIMEOUT_S = 10.0
# Between two attempts of several hosts to begin.
_RETRY_S = 0.5


@dataclass(frozen=True)
class Session:
    """A session of several processes.

    client  -- this process's session; its rank is that of its handle
    sidecar -- what this process has started for it, if it has the lowest rank of its host
    """

    client: Client
    sidecar: own_sidecar.OwnSidecar | None

    def close(self) -> None:
        """Ends the session for all ranks. The sidecar ends when the workers of this host have left it."""
        self.client.close()
        if self.sidecar is not None:
            own_sidecar.end_with_workers(self.sidecar, _CONNECT_TIMEOUT_S)


@dataclass(frozen=True)
class World:
    """Who takes part.

    uuid    -- its number
    key     -- a digest by which its processes meet, the same for all of them and for no other world
    members -- handles, by rank
    rank    -- of this process
    """

    uuid: int
    key: str
    members: Sequence[Handle]
    rank: int

    def hosts(self) -> list[list[int]]:
        """Returns the ranks of each host and user, ordered by the first one."""
        found: list[list[int]] = []
        for rank, member in enumerate(self.members):
            mine = next((ranks for ranks in found if member.shares_sidecar(self.members[ranks[0]])), None)
            if mine is None:
                found.append([rank])
            else:
                mine.append(rank)
        return found


def world_of(uuid: int, texts: Collection[str], me: Handle) -> World:
    """Returns the world of these handles.

    uuid  -- distinguishes it from others of the same handles
    texts -- the handles; a sequence gives the ranks, a set is ordered by ID
    me    -- that of this process, one of them

    Raises RondeError with cause "protocol" for one that is no handle, and "settings" for a handle that occurs twice, if
    the own one is missing, or if hosts cannot authenticate each other.
    """
    if not 0 < len(texts) <= _RANKS_MAX:
        raise RondeError(f"a world has 1 to {_RANKS_MAX} handles, not {len(texts)}", "settings")
    members = [handles.decode(text) for text in texts]
    if isinstance(texts, (set, frozenset)):
        members.sort(key=lambda member: member.id)
    ids = [member.id for member in members]
    if len(set(ids)) < len(ids):
        raise RondeError(
            f"the handle {max(ids, key=ids.count)} was given twice; give that of each process once", "settings"
        )
    if me.id not in ids:
        raise RondeError(
            f"the handle of this process ({me.id}) is not among the {len(ids)} of the new world: it is left out, and "
            "must not call reconfigure",
            "settings",
        )
    described = [[member.id, list(member.host), member.user, member.address] for member in members]
    key = hashlib.sha256(json.dumps([uuid, described]).encode()).hexdigest()[:32]
    world = World(uuid, key, members, ids.index(me.id))
    _check_hosts(world)
    return world


def _check_hosts(world: World) -> None:
    hosts = world.hosts()
    if len(hosts) == 1:
        return
    without = [ranks[0] for ranks in hosts if not world.members[ranks[0]].address]
    if without or not os.environ.get(handles.SECRET_FILE):
        names = ", ".join(f"{rank} ({world.members[rank].host.name})" for rank in without) or str(world.rank)
        raise RondeError(
            f"the {len(world.members)} processes are on {len(hosts)} hosts or of several users, whose sidecars need "
            f"credentials by which they authenticate each other, and rank {names} has none. Before groups are made, "
            f"set {handles.SECRET_FILE} to a file with the same secret on all hosts (`ronde certs secret FILE`; "
            "docs/KEYS.md)",
            "settings",
        )


def begin(world: World, timeout: float) -> Session:
    """Begins the session of a world. All its processes call this concurrently.

    timeout -- seconds to wait for the others

    Raises RondeError with cause "settings" or "connect" if it cannot begin; TimedOutError with cause "start" if a
    process does not come, which the text names by its rank.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return _begun(world, deadline)
        except PeerLostError:
            # A sidecar of an earlier session still has the port of one that is to come, or a peer begins again.
            if deadline - time.monotonic() < _RETRY_S:
                raise
        time.sleep(_RETRY_S)


def _begun(world: World, deadline: float) -> Session:
    timeout = max(deadline - time.monotonic(), _RETRY_S)
    hosts = world.hosts()
    local = next(ranks for ranks in hosts if world.rank in ranks)
    started: list[own_sidecar.OwnSidecar] = []

    def start() -> Sidecar:
        started.append(_start(world, hosts, local, deadline))
        return Sidecar(started[0].socket, started[0].job, identity_of(os.getpid()))

    store = DirectoryStore(_directory(world, hosts.index(local)))
    me = Member(local.index(world.rank), len(local), own_host(), os.geteuid(), identity_of(os.getpid()))
    is_first, remove = me.rank == 0, functools.partial(_remove, store, os.getpid())
    if is_first:
        # After a failure the directory stays until the program ends: the others read the reason there.
        atexit.register(remove)
    try:
        sidecar = meet(me, store, timeout, start)
        assert sidecar is not None  # as no member says that it is served
        client = _connected(sidecar, world.rank, max(deadline - time.monotonic(), 1.0))
    except BaseException as error:
        for each in started:
            own_sidecar.stop(each)
        if isinstance(error, TimedOutError) and error.cause == "start":
            raise TimedOutError(_late(str(error), world, local, timeout), "start") from error
        raise
    # All ranks have attached, so they have read what is in the directory.
    if is_first:
        atexit.unregister(remove)
        remove()
    return Session(client, started[0] if started else None)


def _late(text: str, world: World, local: list[int], timeout: float) -> str:
    """Returns the message about processes that have not come, named by their ranks in the world."""
    match = re.match(r"ranks? (\d+(?:, \d+)*) of \d+ did not come", text)
    if match is None:
        return f"{text}. They were given other handles or another uuid, have ended, or need more time than the timeout"
    missing = [local[int(number)] for number in match[1].split(", ")]
    names = f"rank {missing[0]}" if len(missing) == 1 else f"ranks {', '.join(map(str, missing))}"
    have = "has" if len(missing) == 1 else "have"
    # What is left of the timeout when the meeting begins is a little less.
    within = f"{round(timeout, 1):g} s"
    return (
        f"{names} of {len(world.members)} {have} not come within {within}: the process was given other handles or "
        "another uuid, has ended, or needs more time than the timeout"
    )


def _start(world: World, hosts: list[list[int]], local: list[int], deadline: float) -> own_sidecar.OwnSidecar:
    job = f"group-{world.key}"
    if len(hosts) == 1:
        options = ["--local-ranks", str(len(local)), "--job", job]
        return own_sidecar.start_with(options, own_sidecar.variables_alone(os.environ))
    placement = [0] * len(world.members)
    for index, ranks in enumerate(hosts):
        for rank in ranks:
            placement[rank] = index
    options = [
        "--end-with-input",
        "--peers",
        ",".join(world.members[ranks[0]].address_in(world.uuid) for ranks in hosts),
    ]
    options += ["--placement", ",".join(map(str, placement)), "--job", job, "--index", str(hosts.index(local))]
    options += ["--job-secret-file", os.environ[handles.SECRET_FILE]]
    options += ["--start-timeout", str(max(1, math.ceil(deadline - time.monotonic())))]
    return own_sidecar.start_at_ports(options, own_sidecar.variables_with_peers(os.environ), deadline)


def _directory(world: World, host: int) -> pathlib.Path:
    """Returns the directory in which processes of one host meet."""
    return own_base() / f"ronde-group-{os.getuid()}-{world.key[:16]}-{host}"


def _connected(sidecar: Sidecar, rank: int, timeout: float) -> Client:
    path = pathlib.Path(sidecar.socket)
    try:
        PrivateFolder(path).close()
    except OSError as error:
        raise RondeError(
            f"the session directory {path} is not one of this user alone: {error}. Processes of one host must share "
            "the directory for temporary files (XDG_RUNTIME_DIR, TMPDIR)",
            "settings",
        ) from error
    return connect(
        path,
        sidecar.job,
        rank,
        path / f"rank-{rank}.token",
        # Whoever may replace a directory above the session's could put another one in its place.
        sidecar_uid=os.geteuid(),
        connect_timeout=_CONNECT_TIMEOUT_S,
        start_timeout=timeout,
    )


def _remove(store: DirectoryStore, process: int) -> None:
    if process == os.getpid():
        store.remove()
