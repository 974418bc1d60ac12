"""Handles, by which processes name each other before they begin a session together.

A handle is a line of JSON that a process gives to others by any means, such as a store or torchft's lighthouse. It
contains no secret. Whoever can change handles can keep a session from beginning and decides who is asked to take part;
those who do are authenticated as `ronde.reconfigure` explains.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ronde import own_sidecar
from ronde.errors import RondeError
from ronde.processes import HostIdentity, own_host

if TYPE_CHECKING:
    from collections.abc import Iterable

# Of the variables that say where other hosts reach sidecars which this process starts.
ADDRESS, PORTS = "RONDE_HANDLE_ADDRESS", "RONDE_HANDLE_PORTS"
SECRET_FILE = f"{own_sidecar.PREFIX}JOB_SECRET_FILE"
# Below the ports that Linux gives to connections.
_PORTS_DEFAULT = "20000-29999"
# A sidecar has a port for control messages and one for each lane: 4 at most, unless an option says more.
_SIDECAR_PORTS, _PROBED = 8, 5
# A new session has other ports than the three before it, whose sidecars may still be there.
_SESSIONS = 4
_BLOCK = _SIDECAR_PORTS * _SESSIONS
# As open as this process is: no other handle gets their ports.
_reserved: list[socket.socket] = []
_HANDLE_BYTES_MAX = 4096
_PORT_MAX = 65_535


@dataclass(frozen=True)
class Handle:
    """A process, or one of several groups of a process, that may take part in a session.

    id      -- a random number that no other handle has
    host    -- where it runs
    user    -- its effective user ID
    address -- where other hosts reach sidecars that it starts, HOST:PORT with the first of their ports; empty if it has
               no credentials for one
    """

    id: str
    host: HostIdentity
    user: int
    address: str

    def encode(self, **more: Any) -> str:
        """Returns the handle as text.

        more -- further fields, which `decode` ignores
        """
        fields = {"id": self.id, "host": list(self.host), "user": self.user, "address": self.address}
        return json.dumps({**fields, **more})

    def address_in(self, uuid: int) -> str:
        """Returns where other hosts reach its sidecar in the session of a number, HOST:PORT."""
        host, _, port = self.address.rpartition(":")
        return f"{host}:{int(port) + _SIDECAR_PORTS * (uuid % _SESSIONS)}"

    def shares_sidecar(self, other: Handle) -> bool:
        """Returns whether one sidecar can serve both."""
        return self.host.is_same(other.host) and self.user == other.user


def own_handle() -> Handle:
    """Returns a new handle of this process. Raises RondeError with cause "settings" for invalid variables."""
    has_secret = bool(os.environ.get(SECRET_FILE))
    return Handle(secrets.token_hex(16), own_host(), os.geteuid(), _own_address() if has_secret else "")


def decode(text: str) -> Handle:
    """Parses a handle. Raises RondeError with cause "protocol" if it is none."""
    try:
        if len(text) > _HANDLE_BYTES_MAX:
            raise ValueError("it is too long")
        fields = json.loads(text)
        name, boot, network = map(str, fields["host"])
        handle = Handle(str(fields["id"]), HostIdentity(name, boot, network), int(fields["user"]), fields["address"])
        if not re.fullmatch(r"[0-9a-f]{32}", handle.id) or not isinstance(handle.address, str):
            raise ValueError("it has no valid ID or address")
        if handle.address and not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s\[\]:,]+):\d{1,5}", handle.address):
            raise ValueError("its address is not HOST:PORT")
        if handle.address and not 0 < int(handle.address.rpartition(":")[2]) <= _PORT_MAX - _BLOCK + 1:
            raise ValueError("its port is not one of the host")
    except (TypeError, KeyError, ValueError, RecursionError, AttributeError) as error:
        raise RondeError(
            f"{text[:64]!r} is no handle of ronde ({type(error).__name__}: {error}); give what "
            "get_reconfigure_handle() of each group returns, of one release of ronde",
            "protocol",
        ) from error
    return handle


def _own_address() -> str:
    return reserved_address(os.environ.get(ADDRESS) or socket.gethostname())


def reserved_address(host: str) -> str:
    """Reserves ports for a sidecar that this process starts. Returns HOST:PORT with the first of them.

    host -- a name or an address of this host

    No other process of ronde on this host gets them while this one lives. Raises RondeError with cause "settings" for
    an invalid RONDE_HANDLE_PORTS, or if none are free.
    """
    return f"{f'[{host}]' if ':' in host else host}:{_free_block(*_range(os.environ.get(PORTS) or _PORTS_DEFAULT))}"


def release() -> None:
    """Gives back the ports that this process has reserved; its sidecars have ended."""
    while _reserved:
        _reserved.pop().close()


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", text)
    low, high = (int(match[1]), int(match[2])) if match else (0, 0)
    if not 0 < low <= high - _BLOCK + 1 or high > _PORT_MAX:
        raise RondeError(f"{PORTS} is {text!r}; it is LOW-HIGH, at least {_BLOCK} ports, as in 7400-7499", "settings")
    return low, high


def _free_block(low: int, high: int) -> int:
    """Reserves ports that are free now, and returns the first. A sidecar binds them later, and reports if it cannot."""
    firsts = range(low, high - _BLOCK + 2, _BLOCK)
    for first in random.SystemRandom().sample(firsts, len(firsts)):
        if _reserve(first):
            return first
    raise RondeError(
        f"of the ports {low}-{high} ({PORTS}), no {_BLOCK} that follow each other are free on this host; give more",
        "settings",
    )


def _reserve(first: int) -> bool:
    """Returns whether these ports were free; they are this process's now, which others of this host pass over."""
    mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        # A name without a file, of this network namespace, which ends with the process.
        mark.bind(f"\0ronde-ports-{first}")
    except OSError:
        mark.close()
        return False
    if all(_are_free(range(each, each + _PROBED)) for each in range(first, first + _BLOCK, _SIDECAR_PORTS)):
        _reserved.append(mark)
        return True
    mark.close()
    return False


def _are_free(ports: Iterable[int]) -> bool:
    family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
    with contextlib.ExitStack() as stack:
        for port in ports:
            for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM):
                try:
                    stack.enter_context(socket.socket(family, kind)).bind(("", port))
                except OSError:
                    return False
    return True
