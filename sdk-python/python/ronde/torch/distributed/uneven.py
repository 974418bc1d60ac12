"""Operations that check whether ranks agree on sizes that no request contains."""

from __future__ import annotations

import hashlib
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ronde.torch.distributed.work import InFlight


def dimension_of(*agreed: Any) -> int:
    """Hashes values to a dimension, so that ranks with different values get an error for different dimensions.

    In a shape with another dimension of 0 it adds no elements. Different values have equal hashes once in 2^35.
    """
    digest = hashlib.sha256(repr(agreed).encode()).digest()
    return 1 + (int.from_bytes(digest[:5], "big") >> 5)


class Checked:
    """Two operations in flight: one without elements, which fails if ranks disagree, and one with the data.

    If the first fails, the second is withdrawn, because not all ranks have called it.
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
        """Waits for both and returns the data. Raises what either wait raises."""
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
