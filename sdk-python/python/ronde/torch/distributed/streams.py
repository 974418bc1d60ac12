"""Orders the streams of GPUs around operations.

Where PyTorch copies, which is the default (RONDE_GPU_STAGING), the host waits for the streams. The rest of this text is
about copies of ronde's own, for which the host does not wait.

The thread that finishes an operation may be another one than that which began it, and has other current streams. It
finishes each operation on its own streams, which come after what the beginning thread's streams had then. The thread
that waits makes its current streams wait for the result.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

from ronde.device import is_copied_by_torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

# By GPU.
_finishing: dict[torch.device, Any] = {}


def events_of(tensors: Iterable[torch.Tensor]) -> dict[torch.device, Any]:
    """Returns events after the present work of this thread's current streams on the GPUs that hold these tensors.

    Where PyTorch copies, it waits for that work instead, and returns none.
    """
    events = {}
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        stream = torch.cuda.current_stream(device)
        if is_copied_by_torch():
            stream.synchronize()
        else:
            events[device] = stream.record_event()
    return events


@contextlib.contextmanager
def finishing(begun: Mapping[torch.device, Any]) -> Iterator[None]:
    """Makes streams for finishing operations the current ones, after these events."""
    with contextlib.ExitStack() as stack:
        for device, event in begun.items():
            # Two threads may make one for the same GPU; either can be used.
            stream = _finishing.get(device) or _finishing.setdefault(device, torch.cuda.Stream(device))
            stream.wait_event(event)
            stack.enter_context(torch.cuda.stream(stream))
        yield


def order(events: Mapping[torch.device, Any]) -> None:
    """Makes this thread's current streams wait for the events."""
    for device, event in events.items():
        torch.cuda.current_stream(device).wait_event(event)


def synchronize(events: Mapping[torch.device, Any]) -> None:
    """Waits for the events."""
    for event in events.values():
        event.synchronize()


def have_occurred(events: Mapping[torch.device, Any]) -> bool:
    """Returns whether all of the events have occurred."""
    return all(event.query() for event in events.values())
