"""An independent decoder, built only from docs/PROTOCOL.md, which decodes the document's examples."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "PROTOCOL.md"
HEADER = struct.Struct("<4sHBBIQQ")
CHUNK = struct.Struct("<HIIQQ")
# A field: its name, where it has one, its type, and what ends it.
FIELD = re.compile(r"(?:(\w+): )?(\w+<[^>]*>+|\[[^\]]*\]|\([^)]*\)|\w+)(?:, | \}$|\)$)")
KINDS = {1: "Hello", 2: "Refusal", 3: "Control"}


def section(name: str) -> list[str]:
    found = re.search(rf"<!-- {name}: begin.*?```text\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found, f"the document has no section {name}"
    return found[1].splitlines()


class Types:
    """The types of the document: aliases, structs and enums."""

    def __init__(self, lines: list[str]) -> None:
        self.aliases: dict[str, str] = {}
        self.structs: dict[str, str] = {}
        self.enums: dict[str, list[tuple[str, str]]] = {}
        for line in lines:
            word, rest = line.split(maxsplit=1)
            if word == "type":
                name, meaning = rest.split(" = ")
                self.aliases[name] = meaning
            elif word == "struct":
                name, fields = rest.split(" ", 1)
                self.structs[name] = fields
            elif word == "enum":
                variants = self.enums.setdefault(rest, [])
            else:
                name = re.split(r"[ (]", rest, maxsplit=1)[0]
                fields = rest[len(name) :].strip()
                assert int(word) == len(variants), line
                variants.append((name, fields))


class Reader:
    def __init__(self, types: Types, data: bytes) -> None:
        self.types, self.data, self.at = types, data, 0

    def take(self, count: int) -> bytes:
        assert self.at + count <= len(self.data), "a message ends too early"
        self.at += count
        return self.data[self.at - count : self.at]

    def varint(self) -> int:
        value = shift = 0
        while True:
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def zigzag(self) -> int:
        value = self.varint()
        return value >> 1 ^ -(value & 1)

    def read(self, kind: str) -> str:
        """The value of a type, in the notation of the document."""
        if kind in self.types.aliases:
            return self.read(self.types.aliases[kind])
        if kind in self.types.structs:
            return kind + " " + self.fields(self.types.structs[kind])
        if kind in self.types.enums:
            name, fields = self.types.enums[kind][self.varint()]
            separator = " " if fields.startswith("{") else ""
            return name + (separator + self.fields(fields) if fields else "")
        return self.primitive(kind)

    def primitive(self, kind: str) -> str:
        simple = {
            "bool": lambda: "true" if self.take(1)[0] else "false",
            "u8": lambda: str(self.take(1)[0]),
            "u16": lambda: str(self.varint()),
            "u32": lambda: str(self.varint()),
            "u64": lambda: str(self.varint()),
            "i32": lambda: str(self.zigzag()),
            "f64": lambda: str(struct.unpack("<d", self.take(8))[0]),
            "Bytes": lambda: f"b{json.dumps(self.take(self.varint()).decode())}",
            "String": lambda: '"' + self.take(self.varint()).decode() + '"',
        }
        return simple[kind]() if kind in simple else self.compound(kind)

    def compound(self, kind: str) -> str:
        if inner := re.fullmatch(r"Vec<(.*)>", kind):
            return self.several(inner[1], self.varint())
        if inner := re.fullmatch(r"\[(\w+); (\d+)\]", kind):
            return self.several(inner[1], int(inner[2]))
        if inner := re.fullmatch(r"Option<(.*)>", kind):
            return f"Some({self.read(inner[1])})" if self.take(1)[0] else "None"
        assert kind.startswith("("), f"the document does not define {kind}"
        return self.fields(kind)

    def several(self, kind: str, count: int) -> str:
        return "[" + ", ".join([self.read(kind) for _ in range(count)]) + "]"

    def fields(self, text: str) -> str:
        """Of a struct `{ name: type, ... }` or a tuple `(type, ...)`."""
        parts = re.findall(FIELD, text[1:].strip())
        shown = ", ".join([(f"{name}: " if name else "") + self.read(kind) for name, kind in parts])
        return f"{{ {shown} }}" if text.startswith("{") else f"({shown})"


def examples() -> list[Any]:
    found: list[Any] = []
    for line in section("examples"):
        if not line.startswith(" "):
            found.append([line, "", b""])
        elif not line.startswith("    "):
            found[-1][1] = line.strip()
        else:
            found[-1][2] += bytes.fromhex(line)
    return [pytest.param(meaning, data, id=name) for name, meaning, data in found]


def test_there_are_examples_of_every_kind_of_frame() -> None:
    assert {param.values[1][6] for param in examples()} == {1, 2, 3, 4, 5, 6}


@pytest.mark.parametrize(("meaning", "data"), examples())
def test_examples_are_read_by_the_document_alone(meaning: str, data: bytes) -> None:
    magic, version, kind, flags, length, _epoch, seq = HEADER.unpack_from(data)
    payload = data[HEADER.size :]
    assert (magic, version, length) == (b"RNDE", 7, len(payload))
    if kind in KINDS:
        reader = Reader(Types(section("types")), payload)
        assert reader.read(KINDS[kind]) == meaning
        assert reader.at == len(payload)
    elif kind == 4:
        lane, sub_schedule, round_, start, count = CHUNK.unpack_from(payload)
        values = struct.unpack(f"<{count}f", payload[CHUNK.size :])
        if round_ == 0xFFFF_FFFF:
            assert meaning == f"lane {lane}, sub-schedule {sub_schedule}, taken"
        else:
            early = ", sent early" if flags & 1 else ""
            shown = " and ".join(str(value) for value in values)
            span = f"elements {start} to {start + count - 1}"
            assert (
                meaning
                == f"lane {lane}, sub-schedule {sub_schedule}, round {round_}, {span}{early}: {shown} as float32"
            )
    elif kind == 5:
        assert (meaning, payload) == (f"up to {seq}", b"")
    else:
        assert (meaning, kind, payload) == ("another certificate", 6, b"")
