"""The session of the agents: one rank for each node, over sidecars that authenticate each other.

A thread gathers what all agents have submitted, several times a second, and applies it to the replica of each. A key
that is read is read from the replica, without a message.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Callable

import numpy as np

from ronde import own_sidecar
from ronde.torchrun.replica import BATCH_BYTES_MAX, Batch, Operation, Replica, Result, decode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.client import Client

# Between two exchanges, while there are operations and for a while after the last one, and otherwise.
_BUSY_INTERVAL_S, _IDLE_INTERVAL_S = 0.02, 0.2
_BUSY_EXCHANGES = 100
# Exchanges need all agents; one that has stopped does not keep the others from leaving.
_LEAVE_TIMEOUT_S = 10.0
_LENGTH = struct.Struct("<Q")


class LinkEndedError(Exception):
    """The session of the agents is over, as the text explains."""


class _Pending:
    """An operation that is not applied yet."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.is_done = False
        self.result: Result = None


class _Waiter:
    """A thread that waits until the store's values fulfil a condition."""

    def __init__(self, is_done: Callable[[dict[str, bytes]], bool]) -> None:
        self._is_done = is_done
        self.values: dict[str, bytes] | None = None  # the first ones that fulfil it

    def note(self, values: dict[str, bytes]) -> None:
        """Keeps the values if they fulfil the condition: the next operation may delete one before the thread wakes."""
        if self.values is None and self._is_done(values):
            self.values = dict(values)


class Link:
    """The session of the agents.

    client  -- its ronde session; its rank is the number of the node
    sidecar -- that of this node's agent
    names   -- of all nodes
    """

    def __init__(self, client: Client, sidecar: own_sidecar.OwnSidecar, names: Sequence[str]) -> None:
        self._client, self._sidecar, self._names = client, sidecar, names
        self._changed = threading.Condition()
        self._replica = Replica()
        self._pending: deque[_Pending] = deque()
        self._waiters: list[_Waiter] = []
        self._leaves: str | None = None
        self._left: tuple[int, str] | None = None
        self._failure: str | None = None
        self._idle_exchanges = 0
        self._thread = threading.Thread(target=self._run, name="ronde-agents", daemon=True)

    def gather(self, data: bytes, name: str) -> list[bytes]:
        """Returns what all agents have given, in the order of the nodes. Before `start` only. Raises RondeError."""
        return gathered(self._client, data, f"agents.{name}", len(self._names))

    def barrier(self, name: str) -> None:
        """Returns when all agents have called this. Before `start` only. Raises RondeError."""
        self._client.barrier(f"agents.{name}")

    def start(self) -> None:
        """Starts the exchanges."""
        self._thread.start()

    # === For other threads ===

    def submit(self, operation: Operation, timeout: float) -> Result:
        """Changes the store of all agents and returns the result.

        Raises LinkEndedError if the session ends before, TimeoutError if an agent does not take part within the
        timeout, and errors of the operation.
        """
        pending = _Pending(operation)
        with self._changed:
            self._check_runs()
            self._pending.append(pending)
            self._changed.notify_all()
            self._changed.wait_for(lambda: pending.is_done or self._is_over(), timeout)
            if not pending.is_done:
                self._check_runs()
                raise TimeoutError(f"an agent of torchrun has not taken part in an exchange for {timeout:.0f} s")
        if isinstance(pending.result, Exception):
            raise pending.result
        return pending.result

    def wait(self, is_done: Callable[[dict[str, bytes]], bool], timeout: float) -> dict[str, bytes] | None:
        """Waits until the store's values fulfil a condition, if only for a moment. Raises LinkEndedError.

        Returns the first values that fulfil it, None after the timeout.
        """
        waiter = _Waiter(is_done)
        with self._changed:
            waiter.note(self._replica.values)
            self._waiters.append(waiter)
            try:
                self._changed.wait_for(lambda: waiter.values is not None or self._is_over(), timeout)
            finally:
                self._waiters.remove(waiter)
            if waiter.values is None:
                self._check_runs()
        return waiter.values

    def values(self) -> dict[str, bytes]:
        """Returns a copy of the store, even of one whose session is over."""
        with self._changed:
            return dict(self._replica.values)

    def left(self) -> tuple[int, str] | None:
        """Returns which node has left the session first, and why: RESTARTS or CLOSES; None if none has."""
        with self._changed:
            return self._left

    def is_over(self) -> bool:
        """Returns whether the session has ended, or failed because an agent was lost."""
        with self._changed:
            return self._is_over()

    def end(self, reason: str) -> None:
        """Leaves the session, which ends for all agents, and stops the sidecar. Does nothing in a session that is over.

        reason -- RESTARTS or CLOSES, for the other agents
        """
        with self._changed:
            self._leaves = reason
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(_LEAVE_TIMEOUT_S)
        self._close()
        if self._thread.is_alive():
            self._thread.join(_LEAVE_TIMEOUT_S)

    # === The thread ===

    def _run(self) -> None:
        failure = None
        try:
            while self._left is None:
                self._exchange()
                self._pause()
            # An agent may close its session only when all others have what it sent last. Errors of the others' end are
            # expected here.
            self._client.barrier("agents.end")
        except Exception as error:
            failure = str(error)
        with self._changed:
            if self._left is None:
                self._failure = failure or "it has ended"
            self._changed.notify_all()
        self._close()

    def _exchange(self) -> None:
        with self._changed:
            mine: list[_Pending] = []
            bytes_taken = 0
            while self._pending and (not mine or bytes_taken + self._pending[0].operation.size() <= BATCH_BYTES_MAX):
                mine.append(self._pending.popleft())
                bytes_taken += mine[-1].operation.size()
            batch = Batch(tuple(each.operation for each in mine), self._leaves)
        batches = self._decoded(self.gather(batch.encode(), "exchange"))
        with self._changed:
            for node, other in enumerate(batches):
                results = [self._apply(operation) for operation in other.operations]
                if node == self._client.rank:
                    for each, result in zip(mine, results):
                        each.result, each.is_done = result, True
                if other.leaves is not None and self._left is None:
                    self._left = (node, other.leaves)
            is_idle = not any(each.operations for each in batches)
            self._idle_exchanges = self._idle_exchanges + 1 if is_idle else 0
            self._changed.notify_all()

    def _apply(self, operation: Operation) -> Result:
        """Changes this agent's replica. The lock is held."""
        result = self._replica.apply(operation)
        for waiter in self._waiters:
            waiter.note(self._replica.values)
        return result

    def _decoded(self, parts: Sequence[bytes]) -> list[Batch]:
        batches = []
        for node, part in enumerate(parts):
            try:
                batches.append(decode(part))
            except ValueError as error:
                raise ValueError(
                    f"the agent of node {node} ({self._names[node]}) sent {error}; install one release of ronde on all "
                    "nodes"
                ) from error
        return batches

    def _pause(self) -> None:
        interval = _BUSY_INTERVAL_S if self._idle_exchanges < _BUSY_EXCHANGES else _IDLE_INTERVAL_S
        with self._changed:
            if self._left is None:
                self._changed.wait_for(lambda: bool(self._pending) or self._leaves is not None, interval)

    def _is_over(self) -> bool:
        return self._left is not None or self._failure is not None

    def _check_runs(self) -> None:
        """Raises LinkEndedError if the session is over. The lock is held."""
        if self._left is not None:
            node, reason = self._left
            raise LinkEndedError(f"node {node} ({self._names[node]}) {_REASONS[reason]}")
        if self._failure is not None:
            raise LinkEndedError(f"the session of torchrun's agents is over: {self._failure}")

    def _close(self) -> None:
        self._client.close()
        own_sidecar.stop(self._sidecar)


_REASONS = {"restarts": "has begun to start its workers again", "closes": "has ended its workers and left the job"}


def gathered(client: Client, data: bytes, name: str, count: int) -> list[bytes]:
    """Returns what all ranks of a session have given, in their order. Raises RondeError, and ValueError for garbage.

    count -- of the ranks
    """
    framed = np.frombuffer(_LENGTH.pack(len(data)) + data, dtype=np.uint8)
    return _split(np.asarray(client.allgather(framed, name=name)).tobytes(), count)


def _split(data: bytes, count: int) -> list[bytes]:
    """Returns the parts, each of which begins with its length. Raises ValueError if there are not as many."""
    parts, offset = [], 0
    while offset < len(data):
        if len(data) - offset < _LENGTH.size:
            raise ValueError("a part of an exchange has no length")
        (length,) = _LENGTH.unpack_from(data, offset)
        offset += _LENGTH.size
        if length > len(data) - offset:
            raise ValueError("a part of an exchange is shorter than its length")
        parts.append(data[offset : offset + length])
        offset += length
    if len(parts) != count:
        raise ValueError(f"an exchange has {len(parts)} parts, not one for each of {count} nodes")
    return parts


def until(deadline: float) -> float:
    """Returns the seconds until a deadline of the monotonic clock, at least 0."""
    return max(0.0, deadline - time.monotonic())
