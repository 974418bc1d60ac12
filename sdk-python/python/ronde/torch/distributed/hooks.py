"""Communication hooks of DistributedDataParallel whose callbacks call collectives, as PowerSGD's do.

Collectives of a group are matched between ranks by the order of their calls. A callback of a future runs at once where
the operation is complete already, and later in another thread where it is not: its calls come earlier among those of
the backward pass on one rank, and later on another. So what a hook calls for a bucket of gradients is matched by the
bucket and the order within the hook, in which callbacks of one bucket follow each other.
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

    label -- in the names of its operations
    lane  -- in which they are settled
    """

    def __init__(self, label: str, lane: Lane) -> None:
        self.label = label
        self.lane = lane
        self._count = 0

    def next(self) -> int:
        """The number of a call."""
        self._count += 1
        return self._count


_thread = threading.local()


def current() -> Calls | None:
    """The calls to which one of this thread belongs; None outside of hooks and their callbacks."""
    return getattr(_thread, "calls", None)


@contextlib.contextmanager
def calling(calls: Calls | None) -> Iterator[None]:
    """What this thread calls meanwhile belongs to these."""
    before = current()
    _thread.calls = calls
    try:
        yield
    finally:
        _thread.calls = before


def by_bucket(hook: Callable[..., Any], label: str, completer: Completer, make_lane: type[Lane]) -> Callable[..., Any]:
    """The hook, whose calls are matched by bucket."""
    lanes: dict[int, Lane] = {}

    @functools.wraps(hook)
    def called(state: Any, bucket: Any) -> Any:
        index = bucket.index()
        lane = lanes.setdefault(index, make_lane(completer))
        with calling(Calls(f"{label}.{index}", lane)):
            return hook(state, bucket)

    return called


def on_registration(wrap: Callable[[DistributedDataParallel, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has hooks of models pass through `wrap` when they are registered, as PyTorch tells nobody of them."""
    register = DistributedDataParallel.register_comm_hook

    @functools.wraps(register)
    def registered(self: DistributedDataParallel, state: Any, hook: Callable[..., Any]) -> None:
        register(self, state, wrap(self, hook))

    DistributedDataParallel.register_comm_hook = registered  # type: ignore[method-assign]
