"""The private directory in which an agent of torchrun and its workers exchange what a session needs.

`torchrun --rdzv-backend ronde` runs `ronde.torchrun` in its agent, one for each node. The agent passes the path of the
directory to its workers in RONDE_AGENT. The first worker that begins a session writes how many processes the launcher
has started; the agent then starts the sidecar of its node and answers with its session directory. Each start of the
workers has its own directory.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pathlib
import tempfile
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from ronde.errors import RondeError, TimedOutError
from ronde.private_folder import DirectoryStore, PrivateFolder, own_base
from ronde.processes import ProcessIdentity, identity_of, is_alive

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ronde import _ronde

# As in ronde_entry_points, which neither imports this package nor is part of it.
VARIABLE = "RONDE_AGENT"
_AGENT, _REQUEST, _ANSWER, _SECRET = "agent", "request", "answer", "job-secret"
_POLL_INTERVAL_S = 0.05


class Request(NamedTuple):
    """What a worker writes.

    size       -- the number of processes of the job
    local_size -- of those on this node
    """

    size: int
    local_size: int


class AgentDirectory:
    """The directory, for the agent. It exists until `remove`, or the end of the process."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self.path = pathlib.Path(tempfile.mkdtemp(prefix=f"ronde-torchrun-{os.getuid()}-", dir=own_base()))
        self._store = DirectoryStore(self.path)
        self._store.set(_AGENT, json.dumps({"process": identity_of(self._process)}).encode())
        # An agent that is ended by a signal does not remove it otherwise.
        atexit.register(self.remove)

    def request(self) -> Request | None:
        """Returns what a worker has written; None if none has. Raises RondeError if it cannot be used."""
        value = _read(self._store, _REQUEST)
        if value is None:
            return None
        size, local_size = value.get("size"), value.get("local_size")
        if not isinstance(size, int) or not isinstance(local_size, int):
            raise _foreign(_REQUEST)
        return Request(size, local_size)

    def answer(self, socket: str, job: str) -> None:
        """Reports the sidecar to the workers: its session directory and the name of its job."""
        self._write({"socket": socket, "job": job})

    def report_wait(self, text: str) -> None:
        """Reports what the agent waits for; a worker whose time is over passes it on."""
        self._write({"waits": text})

    def report_failure(self, text: str, cause: str) -> None:
        """Reports why there is no sidecar."""
        self._write({"failure": text, "cause": cause})

    def _write(self, value: Mapping[str, str]) -> None:
        self._store.set(_ANSWER, json.dumps(value).encode())

    def write_secret(self, text: str) -> pathlib.Path:
        """Writes the secret of the workers' job to a file of this user alone, and returns its path."""
        self._store.set(_SECRET, text.encode())
        return self.path / _SECRET

    def remove(self) -> None:
        """Removes the directory; a forked child does not."""
        atexit.unregister(self.remove)
        if self._process == os.getpid():
            self._store.remove()


def is_named(environment: Mapping[str, str]) -> bool:
    """Returns whether an agent of torchrun has started this process and passes its directory."""
    return bool(environment.get(VARIABLE))


def settings(launched: _ronde.LaunchedBy, timeout: float) -> dict[str, Any]:
    """Returns settings for `ronde.connect` to the sidecar that the agent starts for the workers of this node.

    timeout -- seconds to wait for the agent, which waits until a worker of each node has called this

    Raises RondeError with cause "settings" if the variables do not fit together, "connect" if the agent has ended or
    cannot start the sidecar; TimedOutError with cause "start" after the timeout, with what the agent waits for.
    """
    path = pathlib.Path(os.environ[VARIABLE])
    rank, size, local_size = launched.rank, launched.size, launched.local_size
    if rank is None or size is None or local_size is None:
        raise RondeError(
            f"{VARIABLE} is set, so an agent of torchrun has started this process, but RANK, WORLD_SIZE or "
            f"LOCAL_WORLD_SIZE is missing. Pass them on to the program, or unset {VARIABLE} for one that trains alone",
            "settings",
        )
    _check_exists(path)
    store = DirectoryStore(path)
    store.set(_REQUEST, json.dumps({"size": size, "local_size": local_size}).encode())
    socket, job = _answered(store, timeout)
    return {"socket": socket, "job": job, "rank": rank, "sidecar_uid": os.geteuid()}


def _answered(store: DirectoryStore, timeout: float) -> tuple[str, str]:
    deadline = time.monotonic() + timeout
    waits = "its output explains why"
    agent = _agent(store)
    while True:
        # Before the answer, which an agent that has ended may have given.
        has_agent = is_alive(agent)
        value = _read(store, _ANSWER) or {}
        if "failure" in value:
            raise RondeError(str(value["failure"]), str(value.get("cause", "connect")))
        if "socket" in value:
            return str(value["socket"]), str(value["job"])
        if not has_agent:
            raise RondeError(
                "torchrun's agent on this node has ended, and no sidecar serves its workers; its output explains why",
                "connect",
            )
        waits = str(value.get("waits", waits))
        if time.monotonic() >= deadline:
            raise TimedOutError(
                f"torchrun's agent on this node has not started a sidecar within {timeout:.0f} s: {waits}. If the "
                "workers only need more time, raise RONDE_START_TIMEOUT",
                "start",
            )
        time.sleep(_POLL_INTERVAL_S)


def _agent(store: DirectoryStore) -> ProcessIdentity:
    try:
        pid, started, pids = (_read(store, _AGENT) or {})["process"]
        return ProcessIdentity(int(pid), int(started), str(pids))
    except (KeyError, TypeError, ValueError) as error:
        raise _foreign(_AGENT) from error


def _check_exists(path: pathlib.Path) -> None:
    try:
        PrivateFolder(path).close()
    except OSError as error:
        raise RondeError(
            f"the directory of torchrun's agent cannot be used: {error}. {VARIABLE} names it; the agent has ended, or "
            "runs in another container, which must share its directory for temporary files with its workers",
            "connect",
        ) from error


def _read(store: DirectoryStore, key: str) -> dict[str, Any] | None:
    with contextlib.suppress(FileNotFoundError):
        try:
            value = json.loads(store.get(key))
        except ValueError as error:
            raise _foreign(key) from error
        if not isinstance(value, dict):
            raise _foreign(key)
        return value
    return None


def _foreign(key: str) -> RondeError:
    return RondeError(
        f"the value of {key} in the directory of torchrun's agent is not one that ronde of this release wrote; "
        "install one release for the agent and its workers",
        "protocol",
    )
