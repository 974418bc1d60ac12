"""Shows the progress of a run: a bar on a terminal, a line for each part elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any


class Progress:
    """Counts turns. On a terminal with tqdm it is a bar; otherwise each new part is a line."""

    def __init__(self, turns: int) -> None:
        self._bar = _bar(turns)
        self._turns = turns
        self._done = 0
        self._start = time.monotonic()

    def part(self, title: str) -> None:
        """Shows the title of the next part."""
        if self._bar is not None:
            self._bar.set_description(title)
        else:
            share = self._done / max(1, self._turns)
            print(f"[{share:4.0%} {time.monotonic() - self._start:4.0f} s] {title}", file=sys.stderr, flush=True)

    def print_note(self, text: str) -> None:
        """Prints a line above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def turn(self, turns: int = 1) -> None:
        """Adds finished turns."""
        self._done += turns
        if self._bar is not None:
            self._bar.update(turns)

    def close(self) -> None:
        """Closes the bar."""
        if self._bar is not None:
            self._bar.close()


def _bar(turns: int) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(total=turns, unit="turn", dynamic_ncols=True, smoothing=0.05)
