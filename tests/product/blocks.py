"""The fenced blocks of a page of documentation."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pathlib

# The languages of blocks. A language that is in neither is a mistake in the page.
RUN = {"sh", "python", "rust", "toml"}
SHOWN = {"", "c", "console", "json", "text", "yaml"}

FENCE = re.compile(r"(?P<indent> *)```(?P<words>[^`]*)")
NOT_RUN = re.compile(r"<!-- (output, )?not run: (?P<reason>.{8,}) -->")
OUTPUT = "<!-- output -->"
# Of a block that is not run here either.
OUTPUT_NOT_RUN = "<!-- output, not run: "
# In the first line of a file: its name, and how it is run. Without a command a later block runs it. The mark of a
# command that has to fail may be copied with it: it is a comment of the shell.
FILE = re.compile(r"(#|//) (?P<name>[\w.-]+\.\w+)(: (?P<command>.+?)(?P<fails> +# it fails)?)?")


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block, and the comment directly above it."""

    page: str
    line: int
    heading: str
    language: str
    text: str
    # Why no test runs it.
    not_run: str | None = None
    # Its lines are among what the block before it prints.
    is_output: bool = False

    @property
    def file(self) -> tuple[str, str | None] | None:
        """The file that the block is, and the command that runs it; it has to fail if the page says so."""
        match = FILE.fullmatch(self.text.split("\n", 1)[0])
        if match is None:
            return None
        command = match["command"]
        return match["name"], f"if {command}; then exit 1; fi" if match["fails"] else command

    def __str__(self) -> str:
        """Where it is, as editors open it."""
        return f"{self.page}:{self.line}"


def blocks(page: str, text: str) -> list[Block]:
    """All blocks of a page, in order."""
    found: list[Block] = []
    above, heading, opening = "", "", None
    lines: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        if opening is not None:
            start, mark, indent, language = opening
            if line.strip() == "```":
                match = NOT_RUN.fullmatch(mark)
                reason = match["reason"] if match else None
                content = "\n".join(row[len(indent) :] if row.startswith(indent) else row for row in lines)
                is_output = mark == OUTPUT or mark.startswith(OUTPUT_NOT_RUN)
                found.append(Block(page, start, heading, language, content, reason, is_output))
                above, opening = "", None
            else:
                lines.append(line)
        elif fence := FENCE.fullmatch(line):
            # Attributes for rustdoc follow a comma: `rust,no_run`.
            language = fence["words"].strip().split(",")[0].split(" ")[0]
            opening, lines = (number, above, fence["indent"], language), []
        else:
            above = line.strip()
            heading = line.lstrip("# ") if line.startswith("#") else heading
    if opening is not None:
        raise ValueError(f"{page}:{opening[0]}: the block does not end")
    return found


def of_section(page: pathlib.Path, heading: str) -> list[Block]:
    """The blocks under one heading of a page."""
    return [block for block in blocks(page.name, page.read_text()) if block.heading == heading]
