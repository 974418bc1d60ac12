"""The exceptions of ronde. Wrong arguments raise ValueError. Everything else is a RondeError that names the culprit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ronde.codes import CAUSES, code_in, marked

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class LastCall:
    """The last operation that a rank submitted.

    collective -- such as "allreduce"
    operation  -- the name by which the ranks know it, such as "allreduce.grad.7"
    site       -- the line of its program, such as "train.py:88"; None if the client does not report it
    seconds    -- how long before the failure
    """

    collective: str
    operation: str
    site: str | None
    seconds: float


@dataclass(frozen=True)
class FailureRecord:
    """How the rank that failed first ended. All ranks get the same record.

    rank          -- its number
    host          -- the name of its host
    pid           -- the ID of its process there
    ended         -- a description of how its process ended; None if no launcher watched it
    exit_code     -- its exit code
    signal        -- the signal that ended it
    out_of_memory -- whether its control group reports that memory ran out
    last_call     -- the last operation that it submitted
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

    cause   -- what happened, in one word, such as "mismatch", "rank_lost", "limit", "connect"
    code    -- the code of the error, such as "RONDE-E306", which the text contains, too, and
               `ronde explain` explains; None if the cause has none
    rank    -- the rank that failed or was lost, if known
    sidecar -- the sidecar that failed or was lost, if known
    tensor  -- the name of the operation that failed, if it is one
    blame   -- where to fix it: "caller", "peer", "local" or "bug"
    record  -- for a failed rank: how it ended, its last call and its last output (FailureRecord); the text contains
               all of it
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
        text = marked(message, CAUSES.get(cause))
        super().__init__(*([text] if text else []))
        self.cause = cause
        self.code = code_in(text) or CAUSES.get(cause)
        self.rank = rank
        self.sidecar = sidecar
        self.tensor = tensor
        self.blame = blame
        self.record = record

    def __reduce__(self) -> tuple[object, ...]:
        """Makes exceptions picklable, for processes of a launcher or a data loader."""
        parts = (str(self), self.cause, self.rank, self.sidecar, self.tensor, self.blame, self.record)
        return (type(self), parts)


class MismatchError(RondeError):
    """Ranks submitted different requests under one name. The operation failed on all of them; the job continues."""


class RefusedError(RondeError):
    """A request was rejected, withdrawn, or over a limit. The job continues."""


class PeerLostError(RondeError):
    """A worker or a sidecar died or stopped responding. The epoch is over: close the client and connect again."""


class ShutDownError(RondeError):
    """A rank shut down while others had operations pending, or this client is closed."""


class TimedOutError(RondeError):
    """A deadline of this rank passed."""


def from_parts(
    cause: str,
    message: str,
    rank: int | None,
    sidecar: int | None,
    tensor: str | None,
    blame: str,
    record: tuple[Any, ...] | None = None,
) -> RondeError:
    """Returns the exception for an error of the native client."""
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
