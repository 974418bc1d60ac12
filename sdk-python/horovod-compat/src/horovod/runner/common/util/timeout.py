"""Deadlines of activities with several steps."""

from __future__ import annotations

import time


class TimeoutException(Exception):  # noqa: N818 -- Horovod's name
    """An activity has taken too long."""


class Timeout:
    """A deadline that begins now.

    timeout -- in seconds
    message -- the text of the exception; `{activity}` and `{timeout}` in it are replaced
    """

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._timeout_at = time.monotonic() + timeout
        self._message = message

    @property
    def timeout(self) -> float:
        """The given seconds."""
        return self._timeout

    def remaining(self) -> float:
        """Returns the remaining seconds; 0 after the deadline."""
        return max(0.0, self._timeout_at - time.monotonic())

    def timed_out(self) -> bool:
        """Returns whether the deadline has passed."""
        return time.monotonic() > self._timeout_at

    def check_time_out_for(self, activity: str) -> None:
        """Raises TimeoutException, which names the activity, if the deadline has passed."""
        if self.timed_out():
            message = self._message.format(activity=activity, timeout=self._timeout)
            raise TimeoutException(f"{message} Timeout after {self._timeout} seconds.")
