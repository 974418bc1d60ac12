"""A plugin whose reduction traps, as the bytes of a WebAssembly module."""

from __future__ import annotations

import json

I32 = 0x7F
MANIFEST = {
    "abi": 1,
    "name": "faulty",
    "version": "1.0.0",
    "about": "Executes `unreachable` in every reduction",
    "kinds": {"reducer": {"dtypes": ["float32"], "shape": "pairwise", "commutative": True}},
    "parameters": [],
    "limits": {"memory_bytes": 131072, "call_ms": 20, "ranks": 2},
}
# ABI version 1, the call at 64, no parameters; input and output at 65,536, of 65,536 and 32,768 bytes.
TABLE = (1, 64, 0, 0, 65_536, 65_536, 65_536, 32_768)
ONE, ZERO, TRAP = b"\x41\x01", b"\x41\x00", b"\x00"
FUNCTIONS = {"ronde_abi": ONE, "ronde_place": ZERO, "ronde_configure": ZERO, "ronde_reduce": TRAP}


def module() -> bytes:
    """The module."""
    table = b"".join(word.to_bytes(4, "little") for word in TABLE)
    exports = [_name("memory") + b"\x02\x00"]
    exports += [_name(name) + b"\x00" + _number(index) for index, name in enumerate(FUNCTIONS)]
    bodies = [b"\x00" + code + b"\x0b" for code in FUNCTIONS.values()]
    sections = [
        (0, _name("ronde.manifest") + json.dumps(MANIFEST).encode()),
        (1, _vector([bytes([0x60, 0, 1, I32])])),  # one type: no parameters, one i32
        (3, _vector([b"\x00"] * len(FUNCTIONS))),
        (5, _vector([b"\x01\x02\x02"])),  # two pages
        (7, _vector(exports)),
        (10, _vector([_number(len(body)) + body for body in bodies])),
        (11, _vector([b"\x00\x41\x00\x0b" + _number(len(table)) + table])),
    ]
    return b"\0asm\1\0\0\0" + b"".join(bytes([kind]) + _number(len(body)) + body for kind, body in sections)


def _number(value: int) -> bytes:
    """A number in LEB128."""
    low, rest = value & 0x7F, value >> 7
    return bytes([low | 0x80]) + _number(rest) if rest else bytes([low])


def _vector(items: list[bytes]) -> bytes:
    return _number(len(items)) + b"".join(items)


def _name(text: str) -> bytes:
    return _number(len(text)) + text.encode()
