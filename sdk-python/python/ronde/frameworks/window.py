"""A window that bounds the bytes of operations in flight, for loops over many tensors.

A sidecar at its limit returns an error and never blocks, so such loops bound themselves. Waiting for the oldest
operation before submitting the next cannot deadlock if the order is the same on all ranks: all ranks have submitted, or
are submitting, the first incomplete operation.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Callable, Protocol

WINDOW_TENSORS = 64
WINDOW_BYTES = 64 << 20


class InFlight(Protocol):
    """An operation in flight."""

    def wait(self) -> Any:
        """Waits until it is complete."""
        ...


class Window:
    """Operations in flight, oldest first."""

    def __init__(self) -> None:
        self._in_flight: deque[tuple[InFlight, int]] = deque()
        self._bytes = 0

    def submit(self, nbytes: int, submit: Callable[[], InFlight]) -> None:
        """Submits an operation of `nbytes` once there is room. One larger than the window waits for all others."""
        while self._in_flight and (len(self._in_flight) >= WINDOW_TENSORS or self._bytes + nbytes > WINDOW_BYTES):
            self._wait_for_oldest()
        self._in_flight.append((submit(), nbytes))
        self._bytes += nbytes

    def finish(self) -> None:
        """Waits for all operations."""
        while self._in_flight:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        handle, nbytes = self._in_flight.popleft()
        self._bytes -= nbytes
        handle.wait()
