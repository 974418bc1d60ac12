"""Operations whose ranks have to agree on sizes that no message carries."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ronde.torch.distributed.work import InFlight


def dimension_of(*agreed: Any) -> int:
    """A dimension that is the same on all ranks if `agreed` is: ranks with different dimensions get an error.

    Beside a dimension of 0 it costs nothing. Different values have the same one once in 2^35.
    """
    digest = hashlib.sha256(repr(agreed).encode()).digest()
    return 1 + (int.from_bytes(digest[:5], "big") >> 5)


class Checked:
    """Two operations in flight: one without elements, which fails where ranks do not agree, and one with the data.

    When the first fails the second is withdrawn: not all ranks have called that.
    """

    def __init__(self, check: InFlight, data: InFlight) -> None:
        self._check: InFlight | None = check
        self._data: InFlight | None = data
        self._error: Exception | None = None

    def poll(self) -> bool:
        """Whether `wait` would return at once."""
        if self._check is not None and self._check.poll():
            self._read_check(0.0)
        return self._check is None and (self._data is None or self._data.poll())

    def wait(self, timeout: float | None = None) -> Any:
        """The data. Raises what the wait for either of them does."""
        begun = time.monotonic()
        if self._check is not None:
            self._read_check(timeout)
        if self._error is not None or self._data is None:
            raise self._error or AssertionError("only an error drops the data")
        left = None if timeout is None else max(0.0, begun + timeout - time.monotonic())
        return self._data.wait(left)

    def _read_check(self, timeout: float | None) -> None:
        assert self._check is not None
        try:
            self._check.wait(timeout)
        except TimeoutError:
            raise
        except Exception as error:
            self._error, self._data = error, None
        self._check = None
