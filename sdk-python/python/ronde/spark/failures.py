"""The error of a run, and how tasks report to the driver which rank has failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ronde.errors import from_parts

if TYPE_CHECKING:
    from ronde.errors import RondeError


class WorkerError(RuntimeError):
    """A rank failed, and with it the run.

    rank -- the rank that failed first; None if none has begun
    host -- where it ran; "" if it is not known
    """

    def __init__(self, message: str, rank: int | None = None, host: str = "") -> None:
        super().__init__(message)
        self.rank, self.host = rank, host

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes the exception picklable."""
        return type(self), (str(self), self.rank, self.host)


class CannotBeginError(RuntimeError):
    """A task cannot begin. Spark passes on the text of an exception only, so it contains the cause.

    error -- why
    """

    def __init__(self, error: RondeError) -> None:
        super().__init__(f"({error.cause}) {error}")


def cannot_begin(text: str) -> RondeError:
    """Returns the error that made a CannotBeginError with this text."""
    cause, _, message = text.partition(" ")
    return from_parts(cause.strip("()"), message, None, None, None, "caller")
