"""A simulated job: workers are threads of which one runs at a time, in an order that a seed determines.

Its sessions have the methods of `_ronde.Session` that replay needs. A result reaches each rank at its own time, and so
does the end of an epoch, so that an operation is complete on some ranks and not on others when a worker is lost.
"""

from __future__ import annotations

import ctypes
import random
import threading
from typing import TYPE_CHECKING, Any, Callable

import numpy

from ronde.errors import PeerLostError, ShutDownError

if TYPE_CHECKING:
    from collections.abc import Sequence

TURNS_MAX = 30_000


class Crashed(BaseException):
    """Ends the thread of a worker that is lost."""


class HangError(AssertionError):
    """The job makes no progress."""


class Memory:
    """Shared memory."""

    def __init__(self, data: bytes | int) -> None:
        self._array = numpy.frombuffer(bytearray(data), dtype=numpy.uint8)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self._array.__array_interface__
        return interface


class Epoch:
    """A period of constant membership.

    end -- why it is over, for each rank that has received that
    """

    def __init__(self, members: list[int]) -> None:
        self.members = members
        self.operations: dict[str, Shared] = {}
        self.why: Exception | None = None
        self.end: dict[int, Exception] = {}


class Shared:
    """An operation as all ranks see it."""

    def __init__(self) -> None:
        self.inputs: dict[int, tuple[str, str | None, bytes, dict[str, Any]]] = {}
        self.waiting: dict[int, Operation] = {}
        self.result: bytes | None = None


class Cluster:
    """The job.

    crashes  -- after so many turns since all workers have begun a worker is lost, but never the last one
    newcomer -- a worker that comes with the first loss
    kept     -- a worker that is not lost
    first    -- the worker that is lost first
    """

    def __init__(
        self,
        seed: int,
        size: int,
        crashes: Sequence[int],
        newcomer: int | None = None,
        kept: int | None = None,
        first: int | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.live = list(range(size))
        self.members = list(self.live)
        self.lost: set[int] = set()
        self.failures: list[BaseException] = []
        self.outcomes: dict[int, Any] = {}
        self._crashes = sorted(crashes)
        self._newcomer, self._kept, self._first = newcomer, kept, first
        self._turns = 0
        self._begun: set[int] = set()
        self._crashes_from: int | None = None
        self._attached: set[int] = set()
        self._epoch: Epoch | None = None
        self._epochs: list[Epoch] = []
        self._semaphores: dict[int, threading.Semaphore] = {}
        self._running: list[int] = []

    def run(self, program: Callable[[Cluster, int], Any]) -> dict[int, Any]:
        """Runs the program of all workers. Returns what it returned for those that were not lost."""
        threads = []
        for worker in [*self.live, *([] if self._newcomer is None else [self._newcomer])]:
            self._semaphores[worker] = threading.Semaphore(0)
            self._running.append(worker)
            threads.append(threading.Thread(target=self._thread, args=(program, worker), daemon=True))
        for thread in threads:
            thread.start()
        self._semaphores[self.random.choice(self._running)].release()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "the simulation itself is stuck"
        if self.failures:
            raise self.failures[0]
        return self.outcomes

    def _thread(self, program: Callable[[Cluster, int], Any], worker: int) -> None:
        self._semaphores[worker].acquire()
        try:
            while worker == self._newcomer:
                if len(self._running) == 1:
                    raise Crashed  # nobody was lost, so it has not come
                self.turn(worker)
            self._check(worker)
            self.outcomes[worker] = program(self, worker)
        except Crashed:
            pass
        except BaseException as failure:
            self.failures.append(failure)
        finally:
            self._running.remove(worker)
            if worker in self.live:
                self.live.remove(worker)
                self._change(ShutDownError(f"worker {worker} has ended", "shut_down", worker))
            if self._running:
                self._semaphores[self.random.choice(self._running)].release()

    def begun(self, worker: int) -> None:
        """A worker has begun."""
        self._begun.add(worker)
        if len(self._begun) == len(self.live):
            self._crashes_from = self._turns

    def turn(self, worker: int) -> None:
        """Lets other workers run, and events happen."""
        self._turns += 1
        if (
            self._crashes_from is not None
            and self._crashes
            and self._turns - self._crashes_from >= self._crashes[0]
            and len(self.live) > 1
        ):
            self._crashes.pop(0)
            lost = self.random.choice([each for each in self.live if each != self._kept])
            self.lose(lost if self._first not in self.live else self._first)
        for _ in range(2):
            self._deliver()
        following = self.random.choice(self._running)
        if following != worker:
            self._semaphores[following].release()
            self._semaphores[worker].acquire()
        self._check(worker)

    def _check(self, worker: int) -> None:
        if worker in self.lost:
            raise Crashed
        if self.failures or self._turns > TURNS_MAX:
            raise HangError(f"no end after {self._turns} turns")

    # === Memberships ===

    def lose(self, worker: int) -> None:
        """A worker is lost: the epoch ends, and the others get another membership."""
        self.live.remove(worker)
        self.lost.add(worker)
        if self._newcomer is not None:
            self.live.append(self._newcomer)
            self._newcomer = None
        self._change(PeerLostError(f"worker {worker} is lost", "rank_lost", worker))

    def _change(self, why: Exception) -> None:
        self._end_epoch(why)
        self.members = list(self.live)
        self._attached.clear()

    def leave(self, worker: int, epoch: Epoch) -> None:
        """A worker closes its session."""
        if epoch is self._epoch:
            self._end_epoch(ShutDownError(f"worker {worker} has shut down", "shut_down", worker))

    def _end_epoch(self, why: Exception) -> None:
        if self._epoch is not None:
            self._epoch.why, self._epoch = why, None

    def open(self, worker: int) -> Session:
        """Waits until all members have called this."""
        members = self.members
        self._attached.add(worker)
        while self._epoch is None or self._epoch.members is not members or worker not in self._attached:
            if self.members is not members:
                raise PeerLostError("another worker was lost before the epoch began", "rank_lost")
            if self._epoch is None and self._attached == set(members):
                self._epoch = Epoch(members)
                self._epochs.append(self._epoch)
            self.turn(worker)
        return Session(self, worker, self._epoch)

    # === Operations ===

    def submit(self, epoch: Epoch, worker: int, name: str, part: Any) -> Operation:
        """A worker submits its part of an operation."""
        shared = epoch.operations.setdefault(name, Shared())
        assert worker not in shared.waiting, f"worker {worker} has {name} in flight already"
        operation = Operation(self, worker, part[1])
        shared.inputs[worker], shared.waiting[worker] = part, operation
        return operation

    def _deliver(self) -> None:
        """Completes an operation on one rank, or ends the epoch there."""
        if not self._epochs:
            return
        epoch = self.random.choice(self._epochs[-2:])
        for name, shared in list(epoch.operations.items()):
            if shared.result is None and len(shared.inputs) == len(epoch.members):
                shared.result = reduced(shared, epoch.members)
            if shared.result is not None and shared.waiting and self.random.random() < 0.5:
                worker = self.random.choice(list(shared.waiting))
                shared.waiting.pop(worker).complete(shared.result)
                if not shared.waiting:
                    del epoch.operations[name]
        if epoch.why is not None and self.random.random() < 0.3:
            self._report_end(epoch, self.random.choice(epoch.members))

    def _report_end(self, epoch: Epoch, worker: int) -> None:
        assert epoch.why is not None
        epoch.end.setdefault(worker, epoch.why)
        for shared in epoch.operations.values():
            operation = shared.waiting.pop(worker, None)
            if operation is not None:
                operation.error = epoch.why


def reduced(shared: Shared, members: list[int]) -> bytes:
    """Returns the result of an operation."""
    kind, dtype, first, options = next(iter(shared.inputs.values()))
    parts = [shared.inputs[member][2] for member in members]
    if kind == "allgather":
        return b"".join(parts)
    if kind == "barrier":
        return b""
    assert all(each[0] == kind and len(each[2]) == len(first) for each in shared.inputs.values()), "a mismatch"
    if kind == "broadcast":
        assert len({each[3]["root"] for each in shared.inputs.values()}) == 1, "another root"
        return parts[options["root"]]
    arrays = [numpy.frombuffer(part, dtype=dtype) for part in parts]
    total = numpy.sum(arrays, axis=0)
    return bytes((total / len(arrays) if options["op"] == 0 else total).astype(dtype).tobytes())


class Operation:
    """A worker's handle of an operation."""

    def __init__(self, cluster: Cluster, worker: int, dtype: str | None) -> None:
        self._cluster, self._worker, self._dtype = cluster, worker, dtype
        self._result: bytes | None = None
        self.error: Exception | None = None

    def complete(self, result: bytes) -> None:
        """Its result has arrived."""
        self._result = result

    def poll(self) -> bool:
        """Whether it is complete or has failed."""
        self._cluster.turn(self._worker)
        return self._result is not None or self.error is not None

    def wait(self, timeout: float | None = None) -> bool:
        """As `poll`: time does not pass."""
        del timeout
        return self.poll()

    def shape(self) -> list[int]:
        """The shape, in bytes for an all-gather."""
        if self.error is not None:
            raise self.error
        assert self._result is not None
        return [len(self._result) // numpy.dtype(self._dtype or "uint8").itemsize]

    def dtype(self) -> str:
        """The type."""
        return self._dtype or "uint8"

    def take_mapped(self) -> Memory | None:
        """Half of the results are in the worker's memory. Raises the error if it failed."""
        self.shape()
        assert self._result is not None
        return Memory(self._result) if self._cluster.random.random() < 0.5 else None

    def read_into(self, address: int, nbytes: int) -> None:
        """Copies the result."""
        assert len(self._result or b"") == nbytes
        ctypes.memmove(address, self._result, nbytes)


class Session:
    """A worker's session in an epoch."""

    def __init__(self, cluster: Cluster, worker: int, epoch: Epoch) -> None:
        self._cluster, self._worker, self._epoch = cluster, worker, epoch
        self.rank, self.size = epoch.members.index(worker), len(epoch.members)

    def submit(
        self,
        kind: str,
        dtype: str | None,
        shape: Sequence[int],
        address: int,
        nbytes: int,
        *,
        name: str,
        **options: Any,
    ) -> Operation:
        """Submits an operation."""
        self._turn()
        return self._submit(kind, (dtype, shape, address, nbytes), name, options)

    def submit_group(self, kind: str, tensors: Sequence[Any], *, name: str, **options: Any) -> list[Operation]:
        """Submits a group. No part of it is complete before all ranks have submitted all parts."""
        self._turn()
        return [self._submit(kind, each, f"{name}[{index}]", options) for index, each in enumerate(tensors)]

    def _turn(self) -> None:
        self._cluster.turn(self._worker)
        if self._worker in self._epoch.end:
            raise self._epoch.end[self._worker]

    def _submit(self, kind: str, tensor: Any, name: str, options: dict[str, Any]) -> Operation:
        dtype, _, address, nbytes = tensor
        part = (kind, dtype, ctypes.string_at(address, nbytes) if nbytes else b"", options)
        return self._cluster.submit(self._epoch, self._worker, f"{kind}.{name}", part)

    def take_notices(self) -> list[str]:
        """There are none."""
        return []

    def empty(self, nbytes: int) -> Memory:
        """Allocates memory."""
        return Memory(nbytes)

    def close(self) -> None:
        """Ends the session."""
        self._cluster.leave(self._worker, self._epoch)
