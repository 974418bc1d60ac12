"""A reader's terminal: runs the blocks of a page one after the other, as a reader would.

The folder and the variables that one block leaves are those of the next, so `cd`, `export` and the activation of an
environment mean what they mean to a reader.
"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from blocks import Block

# The longest block trains for some seconds; busy machines are slow.
BLOCK_TIMEOUT_S = 180
# `-e`: a page must not continue after a command that failed.
SCRIPT = """
set -eo pipefail
if [ -f {state}/variables ]; then . {state}/variables; cd "$(cat {state}/folder)"; else cd {work}; fi
{{
{commands}
}} </dev/null
export -p > {state}/variables
pwd > {state}/folder
"""


def spaced(line: str) -> str:
    """Returns a line with single spaces between its words."""
    return " ".join(line.split())


def pattern(line: str) -> re.Pattern[str]:
    """Returns the pattern of a line of a page, in which `…` matches any text."""
    return re.compile(".*".join(map(re.escape, spaced(line).split("…"))))


class BlockError(AssertionError):
    """A block did not do what the page describes."""


class Terminal:
    """The state between blocks lies in files, so that each block is a process with an end."""

    def __init__(
        self, folder: pathlib.Path, environment: dict[str, str], within: Sequence[str] = (), root: str = ""
    ) -> None:
        """Works in `folder`; `within` is put before bash, and sees `folder` without `root`."""
        self.folder = folder
        self.work = folder / "work"
        self.state = folder / "state"
        for path in (self.work, self.state):
            path.mkdir(exist_ok=True)
        self.environment = environment
        self.within = list(within)
        self.root = root
        # How long a block may take.
        self.patience_s = BLOCK_TIMEOUT_S
        self.groups: list[int] = []
        self.output = ""

    def run(self, block: Block) -> None:
        """Runs a block, or saves it and runs it by the command in its first line."""
        if block.is_output:
            return self.compare(block)
        if block.file is None:
            commands = block.text if block.language == "sh" else None
            if block.language == "python":
                (self.work / "block.py").write_text(block.text + "\n")
                commands = f"python {self.seen(self.work)}/block.py"
            if commands is None:
                raise BlockError(f"{block}: its first line names neither its file nor its command")
            return self.execute(block, commands)
        name, command = block.file
        (pathlib.Path(self.current_folder()) / name).write_text(block.text + "\n")
        return self.execute(block, command) if command else None

    def execute(self, block: Block, commands: str) -> None:
        """Runs commands; what they print is kept for the next block."""
        script = SCRIPT.format(state=self.seen(self.state), work=self.seen(self.work), commands=commands)
        output = self.folder / "output"
        # Output goes to a file: a process that the block leaves in the background keeps no pipe open.
        with output.open("w") as sink:
            process = subprocess.Popen(
                [*self.within, "bash", "-c", script],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.folder,
                start_new_session=True,
            )
            self.groups.append(process.pid)
            try:
                status = process.wait(self.patience_s)
            except subprocess.TimeoutExpired:
                self.close()
                raise BlockError(f"{block}: still runs after {self.patience_s} s:\n{output.read_text()}") from None
        self.output = output.read_text(errors="replace")
        if status != 0:
            raise BlockError(f"{block}: ends with status {status}:\n{commands}\n--- prints\n{self.output}")

    def compare(self, block: Block) -> None:
        """Each line of the block is a whole line of what the block before it has printed, in any order."""
        printed = [spaced(line) for line in self.output.splitlines()]
        missing = [line for line in block.text.splitlines() if not any(map(pattern(line).fullmatch, printed))]
        if missing:
            raise BlockError(f"{block}: these lines are not printed: {missing}\n--- but\n{self.output}")

    def close(self) -> None:
        """Ends what blocks have left in the background."""
        for group in self.groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.groups.clear()

    def seen(self, path: pathlib.Path) -> str:
        """A path as the blocks see it."""
        return str(path)[len(self.root) :]

    def current_folder(self) -> str:
        """The folder in which the last block has ended."""
        file = self.state / "folder"
        return self.root + file.read_text().strip() if file.exists() else str(self.work)
