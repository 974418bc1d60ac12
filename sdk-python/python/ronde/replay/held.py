"""Operations whose results are held until all ranks have them, and commits of several of them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from ronde.errors import PeerLostError, RondeError, TimedOutError
from ronde.replay.agreement import key_of
from ronde.tensors import address_of, copy_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde import _ronde


class Request:
    """A request that can be submitted again.

    kind, dtype, shape, nbytes -- of the operation and this rank's tensor; a barrier has no dtype
    name    -- its name, by which the ranks match it
    memory  -- a copy of the tensor in shared memory, which stays until the operation is committed; None for 0 bytes
    address -- its address
    options -- further arguments of `_ronde.Session.submit`
    root_worker -- the number of the worker that a broadcast comes from
    """

    def __init__(
        self, kind: str, dtype: str | None, shape: Sequence[int], nbytes: int, name: str, options: dict[str, Any]
    ) -> None:
        self.kind, self.dtype, self.shape, self.nbytes, self.name = kind, dtype, tuple(shape), nbytes, name
        self.options = options
        self.memory: _ronde.Memory | None = None
        self.address = 0
        self.root_worker: int | None = None

    def stage(self, session: _ronde.Session, address: int) -> None:
        """Copies the tensor at an address to shared memory. Raises RefusedError if there is no room for it."""
        if self.nbytes:
            self.memory = session.empty(self.nbytes)
            self.address = address_of(self.memory)
            copy_bytes(self.address, address, self.nbytes)


class Result:
    """A result that outlives its session."""

    def __init__(self, operation: _ronde.Operation, nbytes: int) -> None:
        self._memory = operation.take_mapped() if nbytes else None
        self._copy: Any = None
        if nbytes and self._memory is None:
            # In the sidecar's memory, which is lost with the session.
            self._copy = numpy.empty(nbytes, numpy.uint8)
            operation.read_into(address_of(self._copy), nbytes)
        elif not nbytes:
            operation.shape()  # raises the error if it failed

    def take_mapped(self) -> _ronde.Memory | None:
        """Returns the result if it is in this worker's shared memory, once."""
        memory, self._memory = self._memory, None
        return memory

    def read_into(self, address: int, nbytes: int) -> None:
        """Copies the result to memory of the same length."""
        source = self._copy if self._memory is None else self._memory
        if source is not None:
            copy_bytes(address, address_of(source), nbytes)
        self._memory = self._copy = None


def is_complete(native: _ronde.Operation) -> bool:
    """Returns whether the outcome of a native operation can be read. False while another thread waits for it."""
    try:
        return native.poll() and native.wait(0.0)
    except RondeError:
        raise
    except RuntimeError:
        return False


class Owner(Protocol):
    """What operations and commits belong to: the session, `Replay`."""

    def advance(self, commit: Commit) -> None:
        """Does for a commit what can be done now."""
        ...

    def wait(self, operation: HeldOperation, timeout: float | None) -> bool:
        """Waits for an operation."""
        ...


class HeldOperation:
    """An operation in flight, with the methods of `_ronde.Operation` that reductions and broadcasts need.

    It is ready once it has failed, or is *committed*: complete on all ranks. A lost rank does not make it fail if the
    remaining ranks can perform it again.

    native    -- the operation in the current session; None once its result is here
    result    -- its result, once it is complete on this rank
    error     -- its failure
    is_ready  -- whether the program may read it
    is_early  -- whether the program has got the result before it was committed
    """

    def __init__(self, owner: Owner, request: Request, commit: Commit, group: Group | None = None) -> None:
        self.request, self.commit, self.group = request, commit, group
        self.native: _ronde.Operation | None = None
        self.result: Result | None = None
        self.error: Exception | None = None
        self.is_ready = self.is_early = False
        self._owner = owner

    # === As a native operation ===

    @property
    def name(self) -> str:
        """Its name."""
        return f"{self.request.kind}.{self.request.name}"

    def poll(self) -> bool:
        """Returns whether `wait` would return at once."""
        if not self.is_ready:
            self._owner.advance(self.commit)
        return self.is_ready or (not self.commit.is_sealed and self.native is None)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds. Returns whether it is ready."""
        return self.is_ready or self._owner.wait(self, timeout)

    def shape(self) -> list[int]:
        """The shape of the result. Raises the error if it failed."""
        self._read()
        return [0] if self.request.dtype is None else list(self.request.shape)

    def dtype(self) -> str:
        """The type of the result. Raises the error if it failed."""
        self._read()
        return self.request.dtype or "uint8"

    def take_mapped(self) -> _ronde.Memory | None:
        """The result, if it stays in shared memory. Raises the error if it failed."""
        return self._read().take_mapped()

    def read_into(self, address: int, nbytes: int) -> None:
        """Copies the result to `address`. Raises the error if it failed."""
        self._read().read_into(address, nbytes)

    def _read(self) -> Result:
        if self.error is not None:
            raise self.error
        if self.result is None:
            raise RuntimeError(f"{self.name} is still in flight")
        return self.result

    # === For its session ===

    def finish(self) -> None:
        """Takes the outcome of the native operation, which is complete or has failed.

        Raises PeerLostError if a rank was lost: then it is pending.
        """
        assert self.native is not None
        try:
            self.result = Result(self.native, self.request.nbytes)
        except PeerLostError:
            raise
        except RondeError as error:
            self.fail(error)
        self.native = None

    def forget_result(self) -> None:
        """Makes it pending again, because another rank does not have the result."""
        self.result = None

    def fail(self, error: Exception) -> None:
        """Ends it with an error, unless it is ready."""
        if not self.is_ready:
            self.native = self.result = None
            self.error = error
            self._end()

    def give(self) -> None:
        """Lets the program read it."""
        if not self.is_ready:
            self._end()

    def _end(self) -> None:
        self.is_ready = True
        self.request.memory = None


class Group:
    """Operations that were submitted together.

    name    -- the name of the group
    members -- the operations, in the order of the tensors
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.members: list[HeldOperation] = []


class Commit:
    """Operations whose results the program gets together, after one barrier.

    A rank enters the barrier when it has all results, so a rank that has passed it knows that all ranks have them.
    Ranks that have joined are not waited for; they get no results.

    name      -- the name of the barrier
    is_named, generation, occurrence -- whether commits of this name repeat; how often all ranks have joined; how many
                 of this name were before
    is_sealed -- whether no further operation will be part of it
    members   -- its operations
    waiting   -- those that are not complete on this rank, in the order of submission
    barrier   -- the barrier in the current session, once it was entered
    is_done   -- whether all operations are ready
    """

    def __init__(self, name: str, is_sealed: bool) -> None:
        self.name, self.is_sealed = name, is_sealed
        self.is_named, self.generation, self.occurrence = False, 0, 0
        self.members: list[HeldOperation] = []
        self.waiting: deque[HeldOperation] = deque()
        self.barrier: _ronde.Operation | None = None
        self.is_done = False

    def add(self, operation: HeldOperation) -> None:
        """Adds an operation that was submitted."""
        self.members.append(operation)
        self.waiting.append(operation)

    @property
    def key(self) -> str:
        """Identifies it on all ranks."""
        return key_of(self.name, self.generation, self.occurrence)

    def is_pending(self) -> bool:
        """Returns whether a result is not here yet, or an operation is yet to be submitted."""
        return not self.is_sealed or any(each.result is None and each.error is None for each in self.members)

    def has_early(self) -> bool:
        """Returns whether the program has got a result before the commit."""
        return any(operation.is_early for operation in self.members)

    def needs_barrier(self) -> bool:
        """Returns whether an operation is held. Those that failed, or were committed after a loss, are not."""
        return any(not operation.is_ready or operation.is_early for operation in self.members)

    def given_up(self) -> TimedOutError | None:
        """Returns why this rank never enters the barrier, if it has given up one of the operations.

        The other ranks wait there until this one leaves its session, or give the barrier up in turn.
        """
        errors = (operation.error for operation in self.members)
        return next((error for error in errors if isinstance(error, TimedOutError)), None)

    def end(self, error: Exception | None = None) -> None:
        """Lets the program read all results; with an error, those that are held fail."""
        for operation in self.members:
            if error is None:
                operation.give()
            else:
                operation.fail(error)
            operation.is_early = False
        self.barrier, self.is_done = None, True
