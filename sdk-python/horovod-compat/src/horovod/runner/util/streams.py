"""A pipe between threads of this process."""

from __future__ import annotations

import threading
import time


class Pipe:
    """Transfers data from a writing thread to a reading thread, one chunk at a time.

    `write` blocks until the previous chunk has been read completely, and `read` until there is a chunk.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._left: bytes | str | None = None
        self._is_closed = False

    def write(self, buf: bytes | str) -> None:
        """Writes a chunk. Raises RuntimeError if the pipe is closed, also while it blocks."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._left is None)
            if self._is_closed:
                raise RuntimeError("Pipe is closed")
            self._left = buf if len(buf) else None
            self._changed.notify_all()

    def read(self, length: int = -1, timeout: float | None = None) -> bytes | str | None:
        """Returns the next chunk, or at most `length` of it; None if the pipe is closed and empty.

        Raises TimeoutError if nothing was written within `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._left is None and not self._is_closed:
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise TimeoutError(f"nothing was written to the pipe within {timeout} s")
                self._changed.wait(remaining)
            if self._left is None:
                return None
            length = len(self._left) if length < 0 else length
            piece, rest = self._left[:length], self._left[length:]
            self._left = rest if len(rest) else None
            self._changed.notify_all()
            return piece

    def flush(self) -> None:
        """Does nothing: a chunk is available to the reader as soon as it is written."""

    def close(self) -> None:
        """Closes the pipe for both sides. A written chunk can still be read."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
