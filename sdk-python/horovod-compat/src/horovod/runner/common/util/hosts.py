"""Parses hosts and their slots, from `-H` and host files. Errors are ValueErrors with Horovod's messages."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

# A name, an IPv4 address, or (unlike Horovod) an IPv6 address in brackets; then a number of slots.
_ITEM = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.%\w]+\]):([0-9]+)")
_LINE = re.compile(r"(\S+)\s+slots\s*=\s*([0-9]+)")


class HostInfo(NamedTuple):
    """A host and its number of slots."""

    hostname: str
    slots: int

    @classmethod
    def from_string(cls, host_string: str) -> HostInfo:
        """Parses `host:slots`. Raises ValueError "Invalid host input" for anything else."""
        match = _ITEM.fullmatch(host_string.strip())
        if match is None:
            raise ValueError(f"Invalid host input: {host_string.strip()!r} is not host:slots, for example alpha:4")
        return cls(match[1], int(match[2]))


class SlotInfo(NamedTuple):
    """The host of a rank, with its rank and size in the job, on the host, and across hosts."""

    hostname: str
    rank: int
    local_rank: int
    cross_rank: int
    size: int
    local_size: int
    cross_size: int

    def to_response_string(self) -> str:
        """Returns the numbers as text, without the host: rank, size, local rank, local size, cross rank, cross size."""
        numbers = (self.rank, self.size, self.local_rank, self.local_size, self.cross_rank, self.cross_size)
        return ",".join(map(str, numbers))

    @classmethod
    def from_response_string(cls, response_string: str) -> SlotInfo:
        """Parses the text of `to_response_string`. Raises ValueError for anything else."""
        rank, size, local_rank, local_size, cross_rank, cross_size = map(int, response_string.split(","))
        return cls("", rank, local_rank, cross_rank, size, local_size, cross_size)


INVALID_SLOT_INFO = SlotInfo("", -1, -1, -1, -1, -1, -1)
"""The slot of a process that has lost its slot."""


def parse_hosts(text: str) -> list[HostInfo]:
    """Parses `host:slots,...`. Raises ValueError "Invalid host input" for an invalid item."""
    return [HostInfo.from_string(item) for item in text.split(",")]


def parse_hosts_and_slots(hosts: str) -> tuple[list[str], dict[str, int]]:
    """Returns the names of the hosts in a list of `host:slots`, and their slots. Raises as `parse_hosts` does."""
    found = parse_hosts(hosts)
    return [host.hostname for host in found], {host.hostname: host.slots for host in found}


def parse_host_file(path: str) -> list[HostInfo]:
    """Reads a file with a line `host slots=n` for each host. Empty lines and comments after # are ignored.

    Raises ValueError for any other line, and if the file cannot be read.
    """
    try:
        with open(path) as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except OSError as error:
        raise ValueError(f"cannot read the host file {path}: {error.strerror}") from error
    hosts = []
    for number, line in enumerate(lines, 1):
        match = _LINE.fullmatch(line) or _ITEM.fullmatch(line)
        if match:
            hosts.append(HostInfo(match[1], int(match[2])))
        elif line:
            raise ValueError(f"Invalid host input: line {number} of {path}, {line!r}, is not `host slots=n`")
    return hosts


def check_slots(hosts: Sequence[HostInfo], num_proc: int) -> None:
    """Raises ValueError if the hosts have too few slots."""
    slots = sum(host.slots for host in hosts)
    if num_proc > slots:
        raise ValueError(
            f"Requested more processes ({num_proc}) than there are available slots ({slots}); give the hosts more slots"
        )


def parse_host_files(filename: str) -> str:
    """Converts a host file to a list, `host:slots,...`. Raises as `parse_host_file` does."""
    return in_a_list(parse_host_file(filename))


def in_a_list(hosts: Sequence[HostInfo]) -> str:
    """Returns hosts in the form of `-H`."""
    return ",".join(f"{host.hostname}:{host.slots}" for host in hosts)


def get_host_assignments(
    hosts: Sequence[HostInfo], min_num_proc: int, max_num_proc: int | None = None
) -> list[SlotInfo]:
    """Assigns ranks to hosts, in the order of hosts, up to `max_num_proc` ranks or else all slots.

    Raises ValueError if the hosts have fewer than `min_num_proc` slots.
    """
    check_slots(hosts, min_num_proc)
    places = [(number, local) for number, host in enumerate(hosts) for local in range(host.slots)][:max_num_proc]
    local_sizes = [sum(number == each for each, _ in places) for number in range(len(hosts))]
    assigned = []
    for rank, (number, local) in enumerate(places):
        peers = [each for each, size in enumerate(local_sizes) if size > local]
        cross = peers.index(number)
        name = hosts[number].hostname
        assigned.append(SlotInfo(name, rank, local, cross, len(places), local_sizes[number], len(peers)))
    return assigned
