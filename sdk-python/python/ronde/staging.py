"""A pool of page-locked (pinned) memory for copies between GPUs and the sidecar.

A copy from or to a GPU is direct only with pinned memory, which is slow to allocate. Buffer sizes are powers of two.
Buffers are leased last in, first out. One whose copy is still in progress is not leased before its event completes.
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
    """A pool of idle buffers.

    make -- allocates one of so many bytes, as a tensor of uint8
    """

    def __init__(self, make: Callable[[int], torch.Tensor], idle_bytes_max: int = IDLE_BYTES_MAX) -> None:
        self._make = make
        self._idle_bytes_max = idle_bytes_max
        self._idle: dict[int, list[tuple[torch.Tensor, Any]]] = {}
        self._idle_bytes = 0
        self._lock = threading.Lock()
        # A lease may be finalized anywhere, also while this thread holds the lock, so returning takes no lock.
        self._returned: collections.deque[tuple[torch.Tensor, Any]] = collections.deque()
        self.made = 0

    def lease(self, shape: Sequence[int], dtype: torch.dtype) -> Lease:
        """Leases memory for a tensor. It returns to the pool when the lease is finalized."""
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
        """Returns a buffer to the pool. It may be reused after the event; at once if that is None."""
        self._returned.append((buffer, event))

    def _sort_returned(self) -> list[tuple[torch.Tensor, Any]]:
        """Sorts returned buffers by size. Returns those beyond the limit, which are released."""
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
    event  -- set by the user of the lease: the event after which the memory may be reused
    """

    def __init__(self, pool: Pool, buffer: torch.Tensor, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.event: Any = None
        self._pool = pool
        self._buffer = buffer

    def __del__(self) -> None:
        self._pool.take_back(self._buffer, self.event)


def from_device(tensor: torch.Tensor) -> Lease:
    """Copies a tensor from a GPU. Waits for the kernels that compute it and for the copy."""
    with torch.cuda.device(tensor.device):
        lease = _pinned.lease(tensor.shape, tensor.dtype)
        lease.tensor.copy_(tensor.detach(), non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        copied.synchronize()
    return lease


def for_device(shape: Sequence[int], dtype: torch.dtype) -> Lease:
    """Leases memory for a result that goes to a GPU."""
    return _pinned.lease(shape, dtype)


def to_device(lease: Lease, target: torch.Tensor) -> torch.Tensor:
    """Copies a result to a GPU on the current stream. Does not wait for the copy."""
    with torch.cuda.device(target.device), torch.no_grad():
        target.copy_(lease.tensor, non_blocking=True)
        lease.event = torch.cuda.Event()
        lease.event.record()
    return target


_pinned = Pool(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
