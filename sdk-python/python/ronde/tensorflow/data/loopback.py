"""Makes servers of TensorFlow, which listen on all addresses, accept connections of this host only.

tf.data's servers have no option for the address on which they listen. A packet filter on their listening socket drops
what does not come from the loopback, before the kernel accepts a connection. Attaching one needs no privilege.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
import sys
import time

_SO_ATTACH_FILTER = 26
_ACCEPT_S = 0.1
_NETWORK_HEADER = 0xFFF00000  # an offset from the start of the IP header instead of the TCP header
_LOAD_WORD, _LOAD_BYTE, _AND, _SHIFT_RIGHT, _IF_EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x74, 0x15, 0x06

# Operation, jump if true, jump if false, operand. Jumps count from the next line.
_ONLY_LOOPBACK = [
    (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
    (_SHIFT_RIGHT, 0, 0, 4),
    (_IF_EQUAL, 0, 4, 4),  # IPv4: the source is in 127.0.0.0/8
    (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 12),
    (_AND, 0, 0, 0xFF000000),
    (_IF_EQUAL, 11, 0, 0x7F000000),
    (_RETURN, 0, 0, 0),
    (_IF_EQUAL, 0, 8, 6),  # IPv6: the source is ::1
    (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 8),
    (_IF_EQUAL, 0, 6, 0),
    (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 12),
    (_IF_EQUAL, 0, 4, 0),
    (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 16),
    (_IF_EQUAL, 0, 2, 0),
    (_LOAD_WORD, 0, 0, _NETWORK_HEADER + 20),
    (_IF_EQUAL, 1, 0, 1),
    (_RETURN, 0, 0, 0),
    (_RETURN, 0, 0, 0xFFFFFFFF),
]


def accept_loopback_only(port: int) -> None:
    """Restricts this process's listening sockets of a port to the loopback, and closes others' earlier connections.

    Raises RuntimeError if there is no such socket, and if this system has no packet filters for sockets.
    """
    if not sys.platform.startswith("linux"):
        raise RuntimeError(f"on {sys.platform} servers of tf.data cannot be restricted to the loopback; {_OTHERWISE}")
    code = b"".join(struct.pack("HBBI", *line) for line in _ONLY_LOOPBACK)
    program = ctypes.create_string_buffer(code, len(code))
    filters = struct.pack("HL", len(_ONLY_LOOPBACK), ctypes.addressof(program))
    restricted = 0
    for each in _sockets_of(port):
        if not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            continue
        try:
            each.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filters)
        except OSError as error:
            raise RuntimeError(f"a packet filter cannot be attached to port {port} ({error}); {_OTHERWISE}") from error
        restricted += 1
    if not restricted:
        raise RuntimeError(f"this process does not listen on port {port}, so nothing was restricted; {_OTHERWISE}")
    _close_early_connections(port)
    # For those that the kernel had established, but the server had not accepted yet.
    time.sleep(_ACCEPT_S)
    _close_early_connections(port)


def _close_early_connections(port: int) -> None:
    """Closes connections of other hosts from the moment between the server's start and the filter."""
    for each in _sockets_of(port):
        with contextlib.suppress(OSError):
            address = ipaddress.ip_address(each.getpeername()[0].partition("%")[0])
            if not (getattr(address, "ipv4_mapped", None) or address).is_loopback:
                each.shutdown(socket.SHUT_RDWR)


def _sockets_of(port: int) -> list[socket.socket]:
    """Returns duplicates of this process's TCP sockets with this local port."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            each = socket.socket(fileno=os.dup(int(name)))
            if each.family in (socket.AF_INET, socket.AF_INET6) and each.getsockname()[1] == port:
                found.append(each)
            else:
                each.close()
    return found


_OTHERWISE = "start the compute job with --plaintext-network if anybody on the network may read and write its data"
