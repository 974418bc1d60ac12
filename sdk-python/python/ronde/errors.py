"""What ronde raises. Wrong arguments raise ValueError; everything else is a RondeError with its culprit as data."""

from __future__ import annotations


class RondeError(RuntimeError):
    """A collective, the session or the job failed.

    cause   -- one word for what happened, such as "mismatch", "rank_lost", "limit", "connect"
    rank    -- the rank at fault or gone, where one is known
    sidecar -- the sidecar at fault or gone, where one is known
    tensor  -- the operation concerned, where it is one
    blame   -- who can put it right: "caller", "peer", "local" or "bug"
    """

    def __init__(
        self,
        message: str,
        cause: str = "error",
        rank: int | None = None,
        sidecar: int | None = None,
        tensor: str | None = None,
        blame: str = "caller",
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.rank = rank
        self.sidecar = sidecar
        self.tensor = tensor
        self.blame = blame

    def __reduce__(self) -> tuple[object, ...]:
        """Exceptions travel between processes of a launcher or a data loader."""
        return (type(self), (str(self), self.cause, self.rank, self.sidecar, self.tensor, self.blame))


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
) -> RondeError:
    """The exception for an error of the native client."""
    kind = _KINDS.get(cause, RondeError)
    return kind(message, cause, rank, sidecar, tensor, blame)


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
