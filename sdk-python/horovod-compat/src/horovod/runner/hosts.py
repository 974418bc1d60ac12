"""Hosts and their slots, as `-H` and host files give them. What is wrong raises ValueError in Horovod's words."""

from __future__ import annotations

import re
from typing import NamedTuple

# A name, an IPv4 address, or (what Horovod does not take) an IPv6 address in brackets; then a number of slots.
_ITEM = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.%\w]+\]):([0-9]+)")
_LINE = re.compile(r"(\S+)\s+slots\s*=\s*([0-9]+)")


class Host(NamedTuple):
    """A host and how many ranks it takes."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[Host]:
    """Reads `host:slots,...`. Raises ValueError "Invalid host input" for an item that is none."""
    found = [(item.strip(), _ITEM.fullmatch(item.strip())) for item in text.split(",")]
    for item, match in found:
        if match is None:
            raise ValueError(f"Invalid host input: {item!r} is not host:slots, for example alpha:4")
    return [Host(match[1], int(match[2])) for _, match in found if match]


def parse_host_file(path: str) -> list[Host]:
    """Reads a file with a line `host slots=n` for each host; empty lines and what is behind # count for nothing.

    Raises ValueError for a line that is neither, and when the file cannot be read.
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
            hosts.append(Host(match[1], int(match[2])))
        elif line:
            raise ValueError(f"Invalid host input: line {number} of {path}, {line!r}, is not `host slots=n`")
    return hosts


def check_slots(hosts: list[Host], num_proc: int) -> None:
    """Raises ValueError when the hosts do not take so many ranks."""
    slots = sum(host.slots for host in hosts)
    if num_proc > slots:
        raise ValueError(
            f"Requested more processes ({num_proc}) than there are available slots ({slots}); give the hosts more slots"
        )
