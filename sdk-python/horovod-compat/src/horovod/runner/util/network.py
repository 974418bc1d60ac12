"""IPv4 addresses and interfaces of this host, and detection of its own names. On Linux."""

from __future__ import annotations

import array
import fcntl
import socket
import struct
import warnings
from typing import TYPE_CHECKING

from horovod.runner.util.threads import execute_function_multithreaded

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SIOCGIFCONF = 0x8912
# struct ifreq of Linux: 16 bytes of name, then an address of which bytes 4 to 8 are the IPv4 address.
_NAME_BYTES, _ADDRESS_OFFSET, _IFREQ_BYTES = 16, 20, 40
_BUFFER_BYTES = _IFREQ_BYTES * 1024


def get_local_host_addresses() -> set[str]:
    """Returns all IPv4 addresses of this host's interfaces that are up."""
    return {address for _, address in _addresses()}


def get_local_intfs(nic: str | None = None) -> set[str]:
    """Returns the interfaces with the address 127.0.0.1.

    nic -- restricts the result to this interface
    """
    return {name for name, address in _addresses() if address == "127.0.0.1" and nic in {None, name}}


def resolve_host_address(host_name: str) -> str | None:
    """Returns an IPv4 address of a host. If its name has none, warns and returns None."""
    try:
        return socket.gethostbyname(host_name)
    except OSError as error:
        warnings.warn(f"the host name {host_name} has no address: {error}", stacklevel=2)
        return None


def filter_local_addresses(all_host_names: Sequence[str]) -> list[str]:
    """Returns the names, in order, that are not names of this host."""
    own = get_local_host_addresses()
    resolved = execute_function_multithreaded(resolve_host_address, [[name] for name in all_host_names]) or {}
    return [name for number, name in enumerate(all_host_names) if resolved[number] not in own]


def get_driver_ip(nics: Iterable[str] | None) -> str:
    """Returns the address of the first of these interfaces in the system's order; default: of any interface.

    Raises RuntimeError if none of them has an IPv4 address.
    """
    wanted = None if nics is None else set(nics)
    for name, address in _addresses():
        if wanted is None or name in wanted:
            return address
    raise RuntimeError(f"Cannot find an IPv4 address of the common interface: {', '.join(sorted(wanted or ()))}")


def _addresses() -> list[tuple[str, str]]:
    """Returns names and addresses of interfaces."""
    buffer = array.array("B", bytes(_BUFFER_BYTES))
    address, length = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        # struct ifconf: the length of the buffer, then its address. The call returns the used length.
        answer = fcntl.ioctl(asked.fileno(), _SIOCGIFCONF, struct.pack("iP", length, address))
    used = struct.unpack("iP", answer)[0]
    requests = [buffer[start : start + _IFREQ_BYTES].tobytes() for start in range(0, used, _IFREQ_BYTES)]
    return [
        # An alias is called `eth0:1`.
        (
            request[:_NAME_BYTES].rstrip(b"\0").split(b"\0")[0].decode().partition(":")[0],
            socket.inet_ntoa(request[_ADDRESS_OFFSET : _ADDRESS_OFFSET + 4]),
        )
        for request in requests
    ]
