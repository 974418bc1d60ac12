"""Values that rank 0 reports by `ronde.ray.log` while a function runs, for callbacks of the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

from ray.util.queue import Empty, Queue

if TYPE_CHECKING:
    from collections.abc import Sequence

# A program that reports faster than callbacks take values waits.
_VALUES_MAX = 10_000


class Reports:
    """A queue of reports, as a context manager: an actor of Ray that needs no CPU reserved for it.

    callbacks -- called with each value, in this process
    """

    def __init__(self, callbacks: Sequence[Callable[[Any], Any]]) -> None:
        self._callbacks = tuple(callbacks)
        self.queue: Any = Queue(maxsize=_VALUES_MAX, actor_options={"num_cpus": 0})

    def __enter__(self) -> Reports:
        return self

    def __exit__(self, *error: object) -> None:
        self.queue.shutdown(force=True)

    def deliver(self) -> None:
        """Calls the callbacks with the values that have come. Raises what they do."""
        for _ in range(self.queue.qsize()):
            try:
                value = self.queue.get_nowait()
            except Empty:
                return
            for callback in self._callbacks:
                callback(value)
