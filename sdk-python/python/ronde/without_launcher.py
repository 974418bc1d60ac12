"""Starts sidecars for processes that `ronde run` did not start.

A single program gets its own sidecar. The processes of another launcher (torchrun, srun, mpirun, mpiexec, jsrun)
on one host share one: rank 0 starts it, and the others find it through a directory that only this user can enter. Ranks
that a program numbers by itself find it through the program's key-value store. On several hosts sidecars must run
already, or be started by the agents of `torchrun --rdzv-backend ronde`: without a secret of the job, hosts could not
authenticate each other.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import pathlib
import secrets
import socket
import threading
from typing import TYPE_CHECKING, Any

from ronde import _ronde, agent_directory, own_sidecar
from ronde.elastic.membership import is_elastic
from ronde.errors import RondeError
from ronde.private_folder import DirectoryStore, PrivateFolder, own_base
from ronde.processes import identity_of, is_alive, launcher_of_this_host, own_host
from ronde.rendezvous import WAYS, Member, Sidecar, meet

if TYPE_CHECKING:
    from ronde.rendezvous import Store

# How long ranks wait for each other, in seconds, if no setting says so: that of `ronde.connect`.
START_TIMEOUT_S = 120.0
_FOUND_BY = ("RONDE_SOCKET", "RONDE_JOB")
_START_TIMEOUTS = ("RONDE_START_TIMEOUT", "HOROVOD_START_TIMEOUT")
_LOCAL_JOB = "local"
_RONDE_RUN = "ronde run"
_PROBE_TIMEOUT_S = 5.0


def settings_without_launcher(given: dict[str, Any]) -> dict[str, Any]:
    """Returns settings for `ronde.connect`; starts a sidecar if neither the environment nor the caller names one.

    given -- the caller's settings for `ronde.connect`

    If one of them does, only the rank may be set, to that of another launcher. Raises RondeError with cause "settings"
    if another launcher has started processes on several hosts, or does not say how many on which, and "connect" if no
    sidecar can be started; TimedOutError with cause "start" if a rank of this host does not come.
    """
    if is_elastic():
        return {}  # the number of the worker is set, and its rank comes with the membership
    launched = _ronde.LaunchedBy.detect(dict(os.environ))
    if launched is not None and _has_agent(given.get("socket")):
        own = agent_directory.settings(launched, _start_timeout(given.get("start_timeout")))
        return {**own, **_connect_timeout()}
    if _has_sidecar(given.get("socket")):
        is_ranked = "RONDE_RANK" in os.environ or given.get("rank") is not None
        return {} if launched is None or launched.rank is None or is_ranked else {"rank": launched.rank}
    if launched is None or not launched.is_one_of_several():
        return {"socket": _sidecar_for_one(), "job": _LOCAL_JOB, "rank": 0}
    if launched.launcher == _RONDE_RUN or launched.rank is None or launched.local_size is None:
        raise RondeError(launched.refusal(), "settings")
    if not launched.is_on_one_host():
        raise RondeError(
            f"{launched.launcher} has started {launched.size} processes, {launched.local_size} of them on this host, "
            f"and no sidecar: on several hosts {_way_of(launched.launcher)}{WAYS}",
            "settings",
        )
    sidecar = _shared_sidecar(launched, _start_timeout(given.get("start_timeout")))
    return _settings(sidecar, launched.rank)


def settings_for_ranks(rank: int, size: int, store: Store, timeout: float | None = None) -> dict[str, Any]:
    """Returns settings for `ronde.connect` for a process whose rank and size its program knows.

    rank, size -- of this process, and the number of all; the same size on all ranks
    store      -- a key-value store that the ranks share, such as PyTorch's; they use keys that begin with "ronde/". It
                  is not trusted: see `ronde.rendezvous`
    timeout    -- seconds to wait for the other ranks; default: RONDE_START_TIMEOUT, else HOROVOD_START_TIMEOUT, else
                  120

    All ranks must call this once for each session, concurrently. On one host rank 0 starts a sidecar, which ends with
    the processes that use it. If the environment names a sidecar (RONDE_SOCKET, RONDE_JOB or the usual directory), or
    `ronde run` started the process, that one is used.

    Raises RondeError with cause "settings" if ranks disagree on the size, are on several hosts without sidecars, or two
    processes have one rank; "connect" if the sidecar cannot be started or the store fails; TimedOutError with cause
    "start" if a rank does not come, which the text names.
    """
    if not 0 <= rank < size:
        raise RondeError(f"rank {rank} of {size} processes: a rank is from 0 to {size - 1}", "settings")
    if "RONDE_SIZE" in os.environ or "RONDE_RANK" in os.environ:
        _check_agrees(rank, size)
        if _has_sidecar(None):
            return {"rank": rank}
    served = _has_sidecar(None)
    if size == 1 and not served:
        alone = own_sidecar.start(1, _new_job())
        _keep_for_ranks(alone, _start_timeout(timeout))
        return {"socket": alone.socket, "job": alone.job, "rank": 0}
    sidecar, started = _met(_member(rank, size, served), store, _start_timeout(timeout))
    if started is not None:
        _keep_for_ranks(started, _start_timeout(timeout))
    if sidecar is None:
        return {"rank": rank}
    if rank != 0:
        _check_is_private(sidecar)
    return _settings(sidecar, rank)


def _settings(sidecar: Sidecar, rank: int) -> dict[str, Any]:
    """Returns settings for `ronde.connect` to a sidecar that a process of this user has started."""
    # Whoever may replace a directory above the session's could put another one in its place.
    own = {"sidecar_uid": os.geteuid()}
    return {"socket": sidecar.socket, "job": sidecar.job, "rank": rank, **own, **_connect_timeout()}


# === Sidecars that run already ===


def _has_agent(given: Any) -> bool:
    """Returns whether an agent of torchrun starts the sidecar: the caller and the environment name no other one."""
    is_named = given is not None or any(name in os.environ for name in _FOUND_BY)
    return not is_named and agent_directory.is_named(os.environ)


def _has_sidecar(given: Any) -> bool:
    """Returns whether the caller, the environment or the usual directory names a sidecar."""
    return given is not None or any(name in os.environ for name in _FOUND_BY) or _is_served()


def _is_served() -> bool:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    usual = [pathlib.Path(runtime) / "ronde"] if runtime else []
    # Not Path.exists: it raises an error for a directory that this user cannot enter.
    return any(os.path.exists(directory / "rpc.sock") for directory in [*usual, pathlib.Path("/run/ronde")])


def _check_agrees(rank: int, size: int) -> None:
    """Raises RondeError if the program's rank or size is not that of the job of ronde in the environment."""
    for name, number in (("RONDE_RANK", rank), ("RONDE_SIZE", size)):
        value = os.environ.get(name)
        if value is not None and value != str(number):
            raise RondeError(
                f"the program gives rank {rank} of {size} processes, but {name} is {value}: `ronde run` has started "
                "this process. Give its rank and size, or unset the variables RONDE_* in processes that the program "
                "starts for a job of their own",
                "settings",
            )


def _way_of(launcher: str) -> str:
    return "`horovodrun --mpi` starts sidecars and then mpirun; or " if launcher == "mpirun" else ""


# === Sidecars that this process or another rank of this host starts ===


class _Own:
    """The sidecar of this process alone, or of all ranks of its launcher. It serves one session after another.

    sidecar   -- as started by this process, for itself alone
    shared    -- that of the launcher's ranks
    shared_by -- the ID of this process, which a forked child does not have
    """

    sidecar: own_sidecar.OwnSidecar | None = None
    shared: Sidecar | None = None
    shared_by = 0


class _Ranks:
    """The sidecars that this process started for `settings_for_ranks` and has not released."""

    lock = threading.Lock()
    sidecars: tuple[own_sidecar.OwnSidecar, ...] = ()


_own = _Own()
_ranks = _Ranks()


def _sidecar_for_one() -> str:
    """Returns the session directory of this process's own sidecar. Starts one if there is none or it has ended."""
    if _own.sidecar is None or not _own.sidecar.is_running():
        _own.sidecar = own_sidecar.start(1, _LOCAL_JOB)
    return _own.sidecar.socket


def _keep_for_ranks(started: own_sidecar.OwnSidecar, timeout: float) -> None:
    """Keeps a sidecar for a new session of ranks. Earlier ones end when their workers have left."""
    with _ranks.lock:
        earlier, _ranks.sidecars = _ranks.sidecars, (started,)
    for sidecar in earlier:
        own_sidecar.end_with_workers(sidecar, timeout)


def _met(
    me: Member, store: Store, timeout: float, **options: Any
) -> tuple[Sidecar | None, own_sidecar.OwnSidecar | None]:
    """Meets the other ranks. Returns their sidecar, and that which this process has started; see `meet`.

    A sidecar for ranks that do not meet is stopped.
    """
    started: list[own_sidecar.OwnSidecar] = []

    def start() -> Sidecar:
        started.append(own_sidecar.start(me.size, _new_job()))
        return Sidecar(started[0].socket, started[0].job, identity_of(os.getpid()))

    try:
        sidecar = meet(me, store, timeout, start, **options)
    except BaseException:
        for each in started:
            own_sidecar.stop(each)
        raise
    return sidecar, started[0] if started else None


def _shared_sidecar(launched: _ronde.LaunchedBy, timeout: float) -> Sidecar:
    """Returns the sidecar that all processes of the launcher share."""
    if _own.shared is not None and _own.shared_by == os.getpid() and _serves(_own.shared):
        return _own.shared
    rank, size = launched.rank, launched.size
    assert rank is not None  # the caller has checked them
    assert size is not None
    directory = _rendezvous_directory(launched)
    store = DirectoryStore(directory)
    me = _member(rank, size, served=False)
    sidecar, _ = _met(me, store, timeout, joins_again=True, place=str(directory))
    assert sidecar is not None  # as no rank of it is served
    if rank == 0:
        # After a failure the directory stays: the others read the reason there, perhaps when this process has ended.
        atexit.register(_remove, store, os.getpid())
    else:
        _check_is_private(sidecar)
    _own.shared, _own.shared_by = sidecar, os.getpid()
    return sidecar


def _remove(store: DirectoryStore, process: int) -> None:
    """Removes the directory when the process that began in it ends; a child that it forked does not."""
    if process == os.getpid():
        store.remove()


def _serves(sidecar: Sidecar) -> bool:
    """Returns whether the process that started the sidecar lives, and the sidecar accepts connections."""
    if not is_alive(sidecar.starter):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PROBE_TIMEOUT_S)
        try:
            connection.connect(os.path.join(sidecar.socket, "rpc.sock"))
        except OSError:
            return False
    return True


def _check_is_private(sidecar: Sidecar) -> None:
    """Raises RondeError unless the session directory is this user's, private, and no link; a store proves nothing."""
    path = pathlib.Path(sidecar.socket)
    if not path.is_absolute():
        raise RondeError(f"rank 0 names the session directory {sidecar.socket!r}: the path is not absolute", "settings")
    try:
        PrivateFolder(path).close()
    except FileNotFoundError as error:
        raise RondeError(
            f"rank 0 names the session directory {path}, which does not exist for this process. If ranks run in "
            "containers of their own, mount one directory of this user into all of them and name it in "
            "XDG_RUNTIME_DIR; or start a `ronde sidecar` and set RONDE_SOCKET and RONDE_JOB (docs/MIGRATING.md)",
            "settings",
        ) from error
    except OSError as error:
        raise RondeError(
            f"rank 0 names a session directory that this process does not use: {error}. It must be a directory of this "
            "user alone, and no link",
            "settings",
        ) from error


def _rendezvous_directory(launched: _ronde.LaunchedBy) -> pathlib.Path:
    """Returns a directory that all processes of this run of the launcher can name, and those of no other run."""
    job = launched.job
    if job is None:
        assert launched.rank_variable is not None  # as there is a rank
        job = str(tuple(launcher_of_this_host(launched.rank_variable)))
    # Hosts may share the directory for temporary files. So may containers of one host, each of one rank.
    key = f"{launched.launcher} {job} {launched.restarts} {own_host().boot}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    return own_base() / f"ronde-ranks-{os.getuid()}-{digest}"


def _member(rank: int, size: int, served: bool) -> Member:
    return Member(rank, size, own_host(), os.geteuid(), identity_of(os.getpid()), served)


def _new_job() -> str:
    """Returns a new job's name, so that no rank is admitted to another job's sidecar."""
    return f"ranks-{secrets.token_hex(6)}"


# === Timeouts ===


def _start_timeout(given: float | None) -> float:
    """Returns how long to wait for other ranks, in seconds."""
    if given is not None:
        return float(given)
    for name in _START_TIMEOUTS:
        text = os.environ.get(name)
        if text is not None:
            return _seconds(name, text)
    return START_TIMEOUT_S


def _connect_timeout() -> dict[str, float]:
    """Returns the start timeout of Horovod's variable, unless ronde's own is set."""
    own, horovods = _START_TIMEOUTS
    text = os.environ.get(horovods)
    return {} if text is None or own in os.environ else {"start_timeout": _seconds(horovods, text)}


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise RondeError(f"{name} is {text!r}; it must be a number of seconds above 0", "settings")
    return seconds
