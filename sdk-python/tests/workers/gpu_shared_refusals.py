"""Run by every rank on a software device: what a session may not pass to the sidecar, which goes on afterwards.

The messages are those of mem.sock (docs/PROTOCOL.md), sent as a hostile worker would.
"""

from __future__ import annotations

import array
import ctypes
import os
import pathlib
import socket
from typing import Any

import numpy
import software

import ronde

SIZE = 1 << 20


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("kind", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location_kind", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


def exported(ordinal: int) -> int:
    """Returns a descriptor of 1 MiB of a device's memory."""
    handle, descriptor = ctypes.c_uint64(), ctypes.c_int()
    wanted = Properties(1, 1, 1, ordinal)
    software.call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(SIZE), ctypes.byref(wanted), ctypes.c_uint64(0))
    software.call("cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, 1, ctypes.c_uint64(0))
    return descriptor.value


def ask(line: str, descriptor: int | None) -> str:
    """Sends a line with a descriptor to mem.sock, and returns the answer."""
    path = pathlib.Path(os.environ["RONDE_SOCKET"]) / "mem.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        stream.settimeout(30)
        stream.connect(str(path))
        rights: list[Any] = []
        if descriptor is not None:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        stream.sendmsg([line.encode() + b"\n"], rights)
        return stream.recv(4096).decode()


def check_refused(words: str, line: str, descriptor: int | None) -> None:
    answer = ask(line, descriptor)
    assert answer.startswith("ERR "), (line, answer)
    assert words in answer, (line, answer)


def main() -> None:
    client = ronde.connect()
    ordinal = client.local_rank
    software.use(ordinal)
    guessed, gpu = "00" * 16, f"0000:{ordinal + 1:02x}:00.0"
    memory = exported(ordinal)
    check_refused("no live session has this token", f"DEVICE {guessed} 7 {SIZE} {gpu}", memory)
    check_refused("", f"DEVICE {guessed} 7 {SIZE} {gpu}", None)
    check_refused("", f"DEVICE {guessed} 7 {SIZE} nowhere", memory)
    check_refused("", f"DEVICE {guessed} 07 {SIZE} {gpu}", memory)
    # The sidecar goes on, also for this rank.
    content = numpy.full(5_000, client.rank + 1, "float32")
    own = software.DeviceArray(content, software.Stream())
    client.allreduce(own, ronde.Sum, out=own)
    total = sum(range(1, client.size + 1))
    numpy.testing.assert_array_equal(own.read(), numpy.full(5_000, total, "float32"))
    client.close()
    print("refusals hold")


if __name__ == "__main__":
    main()
