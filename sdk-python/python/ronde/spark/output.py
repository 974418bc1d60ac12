"""The output of a rank: live in the executor's log, and at the end of the rank for the driver."""

from __future__ import annotations

import datetime
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ronde.spark.plan import RunPlan

# Of each stream of a rank; the driver gets the last ones.
KEPT_BYTES_MAX = 16 << 20


class Output:
    """Lines of a rank, with its number before each.

    plan -- which streams the driver wants
    rank -- set when it is known
    """

    def __init__(self, plan: RunPlan) -> None:
        self.rank = 0
        self._timestamps = plan.timestamps
        self._kept: dict[str, deque[bytes]] = {name: deque() for name in plan.keeps_output}
        self._sizes = dict.fromkeys(plan.keeps_output, 0)
        self._dropped = dict.fromkeys(plan.keeps_output, 0)
        self._lock = threading.Lock()

    def emit(self, name: str, line: bytes) -> None:
        """Writes a line of the stream "stdout" or "stderr" to the executor's log, and keeps it for the driver."""
        time = f"{datetime.datetime.now().astimezone().isoformat(timespec='milliseconds')} " if self._timestamps else ""
        prefixed = f"{time}[{self.rank}]<{name}>:".encode() + line
        with self._lock:
            sys.stderr.write(prefixed.decode(errors="replace"))
            sys.stderr.flush()
            if name in self._kept:
                self._keep(name, prefixed)

    def _keep(self, name: str, line: bytes) -> None:
        kept = self._kept[name]
        kept.append(line)
        self._sizes[name] += len(line)
        while self._sizes[name] > KEPT_BYTES_MAX and len(kept) > 1:
            self._sizes[name] -= len(kept.popleft())
            self._dropped[name] += 1

    def kept(self) -> Iterator[tuple[str, bytes]]:
        """Yields each stream that the driver wants, and its content."""
        with self._lock:
            for name, lines in self._kept.items():
                note = f"[{self.rank}]<{name}>: ({self._dropped[name]} earlier lines are in the executor's log only)\n"
                yield name, (note.encode() if self._dropped[name] else b"") + b"".join(lines)
