"""Many operations through a window: bounded bytes in flight, submitted in the same order on all ranks.

A limit of the sidecar is an error at once and never a wait, so loops over many tensors bound themselves. Waiting for
the oldest before submitting the next cannot deadlock, because the order is the same on all ranks: the first operation
that is not complete has been submitted, or is being submitted, by everybody.
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
        """Submits an operation of `nbytes` once there is room for it. A larger one than the window goes alone."""
        while self._in_flight and (len(self._in_flight) >= WINDOW_TENSORS or self._bytes + nbytes > WINDOW_BYTES):
            self._wait_for_oldest()
        self._in_flight.append((submit(), nbytes))
        self._bytes += nbytes

    def finish(self) -> None:
        """Waits for everything."""
        while self._in_flight:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        handle, nbytes = self._in_flight.popleft()
        self._bytes -= nbytes
        handle.wait()
