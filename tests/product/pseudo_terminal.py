"""A program in a pseudo-terminal, and what a person would see on its screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping, Sequence

SEQUENCE = re.compile(r"\x1b\[(\d*)([A-Za-z])")


class PseudoTerminal:
    """A program whose standard streams are a terminal."""

    def __init__(
        self,
        words: Sequence[str],
        environment: Mapping[str, str],
        folder: pathlib.Path,
        size: tuple[int, int] = (30, 100),
    ) -> None:
        """Starts the program in a terminal of `size` rows and columns."""
        self.main, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        self.process = subprocess.Popen(
            words, stdin=end, stdout=end, stderr=end, env=dict(environment), cwd=folder, start_new_session=True
        )
        os.close(end)
        self.text = ""

    def read_until(self, piece: str, within_s: float) -> str:
        """Reads until the piece appears in what has not been searched, and returns that."""
        deadline = time.monotonic() + within_s
        begin = getattr(self, "_searched", 0)
        while (at := self.text.find(piece, begin)) < 0:
            assert self._read(deadline), f"{piece!r} does not appear in:\n{self.text}"
        self._searched = at + len(piece)
        return self.text[begin : self._searched]

    def send(self, text: str) -> None:
        """Types a text."""
        os.write(self.main, text.encode())

    def wait(self, within_s: float) -> int:
        """Reads to the end, and returns the exit status."""
        deadline = time.monotonic() + within_s
        while self._read(deadline):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def screen(self) -> list[str]:
        """The lines as they stand in the end, without those that scrolled away being lost."""
        return screen_of(self.text)

    def close(self) -> None:
        """Ends the program."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        os.close(self.main)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self.main], [], [], max(0.0, deadline - time.monotonic()))
        try:
            data = os.read(self.main, 1 << 16) if ready else b""
        except OSError:  # the other end is closed
            data = b""
        self.text += data.decode(errors="replace")
        return bool(data)


def screen_of(text: str) -> list[str]:
    """Interprets line ends, carriage returns, and the sequences that move up and clear below."""
    lines: list[str] = [""]
    row = column = 0
    at = 0
    while at < len(text):
        if found := SEQUENCE.match(text, at):
            at = found.end()
            if found[2] == "A":
                row = max(0, row - int(found[1] or 1))
            elif found[2] == "J":
                lines[row] = lines[row][:column]
                del lines[row + 1 :]
            continue
        character = text[at]
        at += 1
        if character == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif character == "\r":
            column = 0
        else:
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]
