"""The agents' key-value store as a replicated state machine: each agent applies the same operations in the same order.

Keys are text, values are bytes. What other agents send is parsed as JSON with known fields; nothing of it is executed.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any, NamedTuple, Optional, Union

# The most bytes of all keys and values together, and of one operation.
STORE_BYTES_MAX = 64 << 20
OPERATION_BYTES_MAX = 1 << 20
# The most bytes of the operations that an agent sends at once, before their encoding; a single one may have more.
BATCH_BYTES_MAX = 256 << 10
RESTARTS, CLOSES = "restarts", "closes"

# What an operation returns; an Exception is raised where it was submitted.
Result = Union[bytes, int, bool, None, Exception]


class Operation(NamedTuple):
    """A change of the store.

    kind     -- one of `_KINDS`
    key      -- the key
    value    -- for `set`, `append` and `compare_set`
    expected -- for `compare_set`: the value that is replaced; empty for a key that does not exist
    amount   -- for `add`
    """

    kind: str
    key: str
    value: bytes = b""
    expected: bytes = b""
    amount: int = 0

    def size(self) -> int:
        """Returns how many bytes it has, without their encoding."""
        return len(self.key) + len(self.value) + len(self.expected)


class Batch(NamedTuple):
    """What an agent contributes to one exchange.

    operations -- its changes
    leaves     -- why it leaves the session after this exchange: RESTARTS or CLOSES; None if it stays
    """

    operations: tuple[Operation, ...] = ()
    leaves: Optional[str] = None  # noqa: UP045 - evaluated by NamedTuple on Python 3.9

    def encode(self) -> bytes:
        """Returns the bytes to send."""
        rows = [[each.kind, each.key, _text(each.value), _text(each.expected), each.amount] for each in self.operations]
        return json.dumps({"operations": rows, "leaves": self.leaves}).encode()


def decode(data: bytes) -> Batch:
    """Parses another agent's batch. Raises ValueError if it is none."""
    try:
        fields = json.loads(data)
        operations = tuple(_operation(*row) for row in fields["operations"])
        leaves = fields["leaves"]
    except (TypeError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"not a batch of operations: {error}") from error
    if leaves not in (None, RESTARTS, CLOSES):
        raise ValueError(f"an unknown reason to leave: {leaves!r}")
    return Batch(operations, leaves)


def _operation(kind: Any, key: Any, value: Any, expected: Any, amount: Any) -> Operation:
    if kind not in _KINDS or not isinstance(key, str) or not isinstance(amount, int):
        raise ValueError(f"an unknown operation: {str(kind)[:32]!r}")
    return Operation(kind, key, _bytes(value), _bytes(expected), amount)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError) as error:
        raise ValueError("a value is not base64") from error


class Replica:
    """One agent's copy of the store."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._bytes = 0

    def apply(self, operation: Operation) -> Result:
        """Makes a change, the same on each replica, and returns its result; an error is returned, not raised."""
        if operation.size() > OPERATION_BYTES_MAX:
            return ValueError(f"the value of {operation.key[:64]!r} is larger than {OPERATION_BYTES_MAX} bytes")
        try:
            result: Result = _KINDS[operation.kind](self, operation)
        except (ValueError, MemoryError) as error:
            return error
        return result

    def _write(self, key: str, value: bytes) -> None:
        former = self.values.get(key)
        bytes_then = self._bytes + len(value) - (0 if former is None else len(former))
        bytes_then += len(key) if former is None else 0
        if bytes_then > STORE_BYTES_MAX:
            raise MemoryError(f"the store of torchrun's agents is full: {STORE_BYTES_MAX} bytes")
        self.values[key], self._bytes = value, bytes_then

    def _set(self, operation: Operation) -> Result:
        self._write(operation.key, operation.value)
        return None

    def _append(self, operation: Operation) -> Result:
        self._write(operation.key, self.values.get(operation.key, b"") + operation.value)
        return None

    def _add(self, operation: Operation) -> Result:
        try:
            number = int(self.values.get(operation.key, b"0")) + operation.amount
        except ValueError as error:
            raise ValueError(f"the value of {operation.key[:64]!r} is not a number, so nothing is added") from error
        self._write(operation.key, str(number).encode())
        return number

    def _compare_set(self, operation: Operation) -> Result:
        """Returns the value after the operation, as PyTorch's stores do."""
        found = self.values.get(operation.key)
        if found is None and operation.expected:
            return operation.expected
        if found is not None and found != operation.expected:
            return found
        self._write(operation.key, operation.value)
        return operation.value

    def _delete(self, operation: Operation) -> Result:
        value = self.values.pop(operation.key, None)
        if value is not None:
            self._bytes -= len(operation.key) + len(value)
        return value is not None


_KINDS = {
    "set": Replica._set,
    "append": Replica._append,
    "add": Replica._add,
    "compare_set": Replica._compare_set,
    "delete": Replica._delete,
}
