"""Page-locked memory between GPUs and the sidecar: lent for one operation, and used again.

A copy from or to a GPU goes straight only into page-locked memory, and making that takes long. Buffers come in powers
of two and are handed out last in, first out; one whose copy is still under way waits for its event.
"""

from __future__ import annotations

import collections
import threading
from typing import TYPE_CHECKING, Any, Callable

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

IDLE_BYTES_MAX = 1 << 30
_LEAST_BYTES = 4096


class Pool:
    """Buffers that nobody uses now.

    make -- makes one of so many bytes, as a tensor of uint8
    """

    def __init__(self, make: Callable[[int], torch.Tensor], idle_bytes_max: int = IDLE_BYTES_MAX) -> None:
        self._make = make
        self._idle_bytes_max = idle_bytes_max
        self._idle: dict[int, list[tuple[torch.Tensor, Any]]] = {}
        self._idle_bytes = 0
        self._lock = threading.Lock()
        # What dies may die anywhere, also while the lock is held.
        self._returned: collections.deque[tuple[torch.Tensor, Any]] = collections.deque()
        self.made = 0

    def lease(self, shape: Sequence[int], dtype: torch.dtype) -> Lease:
        """Memory for a tensor; it comes back when the loan dies."""
        elements = 1
        for dimension in shape:
            elements *= dimension
        nbytes = elements * dtype.itemsize
        size = max(_LEAST_BYTES, 1 << max(0, nbytes - 1).bit_length())
        buffer = self._taken(size)
        if buffer is None:
            buffer = self._make(size)
            self.made += 1
        return Lease(self, buffer, buffer[:nbytes].view(dtype).reshape(tuple(shape)))

    def take_back(self, buffer: torch.Tensor, event: Any) -> None:
        """A buffer that may be used again once the event has come; None if at once."""
        self._returned.append((buffer, event))

    def _sort_returned(self) -> list[tuple[torch.Tensor, Any]]:
        """Puts what was returned where it can be found; what is too much is given up."""
        too_much = []
        while self._returned:
            buffer, event = self._returned.popleft()
            size = buffer.numel()
            if self._idle_bytes + size > self._idle_bytes_max:
                too_much.append((buffer, event))
                continue
            self._idle_bytes += size
            self._idle.setdefault(size, []).append((buffer, event))
        return too_much

    def _taken(self, size: int) -> torch.Tensor | None:
        with self._lock:
            too_much = self._sort_returned()
            taken = self._newest(size)
        for _, event in too_much:
            if event is not None:
                event.synchronize()  # its memory is still being read
        return taken

    def _newest(self, size: int) -> torch.Tensor | None:
        found = self._idle.get(size, [])
        for index in range(len(found) - 1, -1, -1):
            buffer, event = found[index]
            if event is None or event.query():
                del found[index]
                self._idle_bytes -= size
                return buffer
        return None


class Lease:
    """A tensor in a pool's memory.

    tensor -- in main memory, contiguous
    event  -- set by the borrower: what has to come before the memory is used again
    """

    def __init__(self, pool: Pool, buffer: torch.Tensor, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.event: Any = None
        self._pool = pool
        self._buffer = buffer

    def __del__(self) -> None:
        self._pool.take_back(self._buffer, self.event)


def from_device(tensor: torch.Tensor) -> Lease:
    """The elements of a tensor on a GPU, once what computes them is done and they are here."""
    with torch.cuda.device(tensor.device):
        lease = _pinned.lease(tensor.shape, tensor.dtype)
        lease.tensor.copy_(tensor.detach(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        copied.synchronize()
    return lease


def for_device(shape: Sequence[int], dtype: torch.dtype) -> Lease:
    """Memory for a result that goes to a GPU."""
    return _pinned.lease(shape, dtype)


def to_device(lease: Lease, target: torch.Tensor) -> torch.Tensor:
    """Copies a result to where it goes, in the order of the current stream; does not wait for it."""
    with torch.cuda.device(target.device), torch.no_grad():
        target.copy_(lease.tensor, non_blocking=True)
        lease.event = torch.cuda.Event()
        lease.event.record()
    return target


_pinned = Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
