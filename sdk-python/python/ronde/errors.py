"""What ronde raises. Wrong arguments raise ValueError; everything else is a RondeError with its culprit as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class LastCall:
    """What a rank asked for last.

    collective -- such as "allreduce"
    operation  -- the name by which the ranks know it, such as "allreduce.grad.7"
    site       -- the place in its program, "train.py:88"; None where the client does not tell
    seconds    -- how long before the failure
    """

    collective: str
    operation: str
    site: str | None
    seconds: float


@dataclass(frozen=True)
class FailureRecord:
    """What is known of the rank that failed first; the same on all ranks.

    rank          -- its number
    host          -- the name of its host
    pid           -- the number of its process there
    ended         -- how its process ended, in words; None where no launcher watched it
    exit_code     -- the code with which it left
    signal        -- the signal that ended it
    out_of_memory -- whether its control group says that memory ran out
    last_call     -- what it asked for last
    stderr        -- the last lines of its standard error, at most 20, control characters escaped
    """

    rank: int
    host: str
    pid: int | None = None
    ended: str | None = None
    exit_code: int | None = None
    signal: int | None = None
    out_of_memory: bool = False
    last_call: LastCall | None = None
    stderr: tuple[str, ...] = ()


class RondeError(RuntimeError):
    """A collective, the session or the job failed.

    cause   -- one word for what happened, such as "mismatch", "rank_lost", "limit", "connect"
    rank    -- the rank at fault or gone, where one is known
    sidecar -- the sidecar at fault or gone, where one is known
    tensor  -- the operation concerned, where it is one
    blame   -- who can put it right: "caller", "peer", "local" or "bug"
    record  -- of a rank that failed: how, what it did last, its last words (FailureRecord); the text has all of it
    """

    def __init__(
        self,
        message: str = "",
        cause: str = "error",
        rank: int | None = None,
        sidecar: int | None = None,
        tensor: str | None = None,
        blame: str = "caller",
        record: FailureRecord | None = None,
    ) -> None:
        super().__init__(*([message] if message else []))
        self.cause = cause
        self.rank = rank
        self.sidecar = sidecar
        self.tensor = tensor
        self.blame = blame
        self.record = record

    def __reduce__(self) -> tuple[object, ...]:
        """Exceptions travel between processes of a launcher or a data loader."""
        parts = (str(self), self.cause, self.rank, self.sidecar, self.tensor, self.blame, self.record)
        return (type(self), parts)


class MismatchError(RondeError):
    """Ranks disagree about an operation. It failed on all of them; the job goes on."""


class RefusedError(RondeError):
    """A request was refused, withdrawn, or over a limit. The job goes on."""


class PeerLostError(RondeError):
    """A worker or a sidecar died or went silent. The epoch is over: close the client and connect anew."""


class ShutDownError(RondeError):
    """A rank left while others had operations pending, or this client is closed."""


class TimedOutError(RondeError):
    """This rank's own deadline passed."""


def from_parts(
    cause: str,
    message: str,
    rank: int | None,
    sidecar: int | None,
    tensor: str | None,
    blame: str,
    record: tuple[Any, ...] | None = None,
) -> RondeError:
    """The exception for an error of the native client."""
    kind = _KINDS.get(cause, RondeError)
    return kind(message, cause, rank, sidecar, tensor, blame, None if record is None else _record(*record))


def _record(
    rank: int,
    host: str,
    pid: int | None,
    ended: str | None,
    exit_code: int | None,
    signal: int | None,
    out_of_memory: bool,
    last_call: tuple[str, str, str | None, float] | None,
    stderr: Sequence[str],
) -> FailureRecord:
    call = None if last_call is None else LastCall(*last_call)
    return FailureRecord(rank, host, pid, ended, exit_code, signal, out_of_memory, call, tuple(stderr))


_KINDS: dict[str, type[RondeError]] = {
    "mismatch": MismatchError,
    "refused": RefusedError,
    "limit": RefusedError,
    "rank_lost": PeerLostError,
    "sidecar_lost": PeerLostError,
    "shut_down": ShutDownError,
    "closed": ShutDownError,
    "timed_out": TimedOutError,
    "start": TimedOutError,
}
