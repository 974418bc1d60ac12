"""The store that torchrun's agents share: PyTorch's interface to their link."""

from __future__ import annotations

import datetime
import time
from typing import TYPE_CHECKING, Any, Callable

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from ronde.torchrun.link import LinkEndedError, until
from ronde.torchrun.replica import Operation, Result

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.torchrun.link import Link


# That of PyTorch's stores.
_DEFAULT_TIMEOUT = datetime.timedelta(minutes=5)


class AgentStore(Store):
    """The store of one start of the workers.

    Values are bytes. All agents see the same changes in the same order, and an agent that reads sees its own; those of
    another agent may come a moment after they have returned there. Waits end with `torch.distributed.DistStoreError`,
    which names what is missing: after the store's timeout, and when an agent leaves or is lost.
    """

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link
        self._timeout = _DEFAULT_TIMEOUT

    @property
    def timeout(self) -> datetime.timedelta:
        """How long calls wait."""
        return self._timeout

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        """Sets how long later calls wait."""
        self._timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Writes a value, or replaces it."""
        self._submit(Operation("set", key, _bytes(value)))

    def append(self, key: str, value: str | bytes) -> None:
        """Appends to a value; one that does not exist is empty."""
        self._submit(Operation("append", key, _bytes(value)))

    def add(self, key: str, value: int) -> int:
        """Adds to a number and returns the sum; one that does not exist is 0."""
        return int(self._submit(Operation("add", key, amount=value)))  # type: ignore[arg-type]

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Replaces a value if it is the expected one, or if none exists and none is expected; returns the value."""
        result = self._submit(Operation("compare_set", key, _bytes(desired_value), _bytes(expected_value)))
        assert isinstance(result, bytes)
        return result

    def delete_key(self, key: str) -> bool:
        """Removes a value; returns whether there was one."""
        return bool(self._submit(Operation("delete", key)))

    def get(self, key: str) -> bytes:
        """Returns a value; waits until there is one."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Returns values; waits until there are all."""
        values = self._awaited(keys, None)
        return [values[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Writes values."""
        for key, value in zip(keys, values):
            self.set(key, value)

    def check(self, keys: Sequence[str]) -> bool:
        """Returns whether all of these exist."""
        values = self._link.values()
        return all(key in values for key in keys)

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Waits until all of these exist, even if one is deleted at once."""
        self._awaited(keys, timeout)

    def _awaited(self, keys: Sequence[str], timeout: datetime.timedelta | None) -> dict[str, bytes]:
        """Returns the first values of the store that contain all of these keys."""
        seconds = (self.timeout if timeout is None else timeout).total_seconds()
        wanted = list(keys)
        done: Callable[[dict[str, bytes]], bool] = lambda values: all(key in values for key in wanted)  # noqa: E731
        try:
            found = self._link.wait(done, seconds)
        except LinkEndedError as error:
            raise DistStoreError(f"{self._missing(wanted)}: {error}") from error
        if found is None:
            raise DistStoreError(
                f"{self._missing(wanted)} within {seconds:.0f} s; the output of the agents on the other nodes explains "
                "what they do"
            )
        return found

    def num_keys(self) -> int:
        """Returns the number of keys."""
        return len(self._link.values())

    def list_keys(self) -> list[str]:
        """Returns all keys."""
        return sorted(self._link.values())

    def has_extended_api(self) -> bool:
        """Returns True: the store has `append`, `multi_get` and `multi_set`."""
        return True

    def _missing(self, keys: Sequence[str]) -> str:
        missing = [key for key in keys if not self.check([key])]
        return f"no agent of torchrun has written {', '.join(missing[:8])}"

    def _submit(self, operation: Operation) -> Result:
        try:
            return self._link.submit(operation, self.timeout.total_seconds())
        except (LinkEndedError, TimeoutError) as error:
            raise DistStoreError(f"{operation.key} cannot be changed: {error}") from error


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def until_all(link: Link, keys: Sequence[str], timeout: float, report: Callable[[list[str]], Any]) -> None:
    """Waits until all keys exist, and reports those that do not whenever these change.

    Raises LinkEndedError, and TimeoutError after the timeout.
    """
    deadline, reported = time.monotonic() + timeout, None
    while True:
        values = link.values()
        missing = [key for key in keys if key not in values]
        if not missing:
            return
        if missing != reported:
            report(missing)
            reported = missing
        if not until(deadline):
            raise TimeoutError
        link.wait(lambda values, known=tuple(missing): any(key in values for key in known), until(deadline))  # type: ignore[misc]
