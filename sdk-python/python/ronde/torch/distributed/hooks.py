"""Support for communication hooks of DistributedDataParallel whose callbacks call collectives, as PowerSGD's do.

Ranks match collectives of a group by call order. A callback of a future runs at once if the operation is complete
already, else later in another thread. So its calls come earlier among those of the backward pass on one rank, and later
on another. Therefore calls of a hook for a bucket of gradients are matched by the bucket and the order within the hook,
in which callbacks of one bucket follow each other.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING, Any, Callable

from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ronde.torch.distributed.progress import Completer, Lane


class Calls:
    """The calls of a hook for one bucket.

    label -- a part of the names of its operations
    lane  -- the lane that completes them
    """

    def __init__(self, label: str, lane: Lane) -> None:
        self.label = label
        self.lane = lane
        self._count = 0

    def next(self) -> int:
        """Returns the number of the next call."""
        self._count += 1
        return self._count


_thread = threading.local()


def current() -> Calls | None:
    """Returns the calls to which this thread's belong; None outside of hooks and their callbacks."""
    return getattr(_thread, "calls", None)


@contextlib.contextmanager
def calling(calls: Calls | None) -> Iterator[None]:
    """Adds this thread's calls within the context to `calls`."""
    before = current()
    _thread.calls = calls
    try:
        yield
    finally:
        _thread.calls = before


def by_bucket(hook: Callable[..., Any], label: str, completer: Completer, make_lane: type[Lane]) -> Callable[..., Any]:
    """Wraps a hook so that its calls are matched by bucket."""
    lanes: dict[int, Lane] = {}

    @functools.wraps(hook)
    def called(state: Any, bucket: Any) -> Any:
        index = bucket.index()
        lane = lanes.setdefault(index, make_lane(completer))
        with calling(Calls(f"{label}.{index}", lane)):
            return hook(state, bucket)

    return called


def on_registration(wrap: Callable[[DistributedDataParallel, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Patches the registration of hooks to pass them through `wrap`, as PyTorch has no notification for it."""
    register = DistributedDataParallel.register_comm_hook

    @functools.wraps(register)
    def registered(self: DistributedDataParallel, state: Any, hook: Callable[..., Any]) -> None:
        register(self, state, wrap(self, hook))

    DistributedDataParallel.register_comm_hook = registered  # type: ignore[method-assign]
