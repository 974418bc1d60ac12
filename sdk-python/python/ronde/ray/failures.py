"""Waits for the results of all ranks, and ends the run on all of them when one fails."""

from __future__ import annotations

import logging
import re
import time
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import ray

from ronde.errors import RondeError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.cluster.layout import Place

_log = logging.getLogger("ronde.ray")
# After the first failure the other ranks have this long to fail or to end by themselves: the cause may be with them.
GRACE_S = 5.0
_POLL_S = 0.2
# Causes of errors that a rank raises because another one has failed.
_OF_OTHERS = ("rank_lost", "sidecar_lost", "shut_down", "closed")
_AFTER = "a callback has failed for a value that rank 0 reported; the error that is raised is that of a failed rank"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class WorkerError(RuntimeError):
    """A rank failed, and with it the run.

    rank -- the rank that failed first
    node -- where it ran
    """

    def __init__(self, message: str, rank: int, node: str) -> None:
        super().__init__(message)
        self.rank, self.node = rank, node

    def __reduce__(self) -> tuple[Any, ...]:
        """Makes the exception picklable, for tasks of Ray that run an executor."""
        return type(self), (str(self), self.rank, self.node)


class _Failure(NamedTuple):
    rank: int
    error: Exception

    def has_ended(self) -> bool:
        """Returns whether the process of the rank has ended."""
        # What the function itself raised is a RayTaskError as well, also if that was about an actor of its own.
        errors = ray.exceptions
        return isinstance(self.error, errors.RayActorError) and not isinstance(self.error, errors.RayTaskError)

    def is_of_another(self) -> bool:
        """Returns whether the rank failed because another one did."""
        cause = getattr(self.error, "cause", None)
        return isinstance(cause, RondeError) and cause.cause in _OF_OTHERS


def collected(
    references: Sequence[Any],
    places: Sequence[Place],
    end: Callable[[], None],
    poll: Callable[[], None] | None = None,
) -> list[Any]:
    """Returns the results of all ranks.

    references -- Ray's references to them, by rank
    places     -- where the ranks run
    end        -- ends all workers
    poll       -- called a few times a second; if it raises an exception while no rank has failed, all workers are ended
                  and the exception is raised. Otherwise it is logged, and the failure of the rank is raised

    Raises WorkerError if a rank fails, with the first traceback. Ranks that still run GRACE_S later are ended. Calls
    `end` also before it raises an exception of another kind, such as KeyboardInterrupt.
    """
    try:
        return _collected(references, places, end, poll or (lambda: None))
    except WorkerError:
        raise
    except BaseException:
        end()
        raise


def _collected(
    references: Sequence[Any], places: Sequence[Place], end: Callable[[], None], poll: Callable[[], None]
) -> list[Any]:
    results: dict[int, Any] = {}
    failures: list[_Failure] = []
    pending = list(references)

    def receive(timeout: float) -> None:
        nonlocal pending
        ready, pending = ray.wait(pending, num_returns=1, timeout=timeout)
        for reference in ready:
            rank = references.index(reference)
            try:
                results[rank] = ray.get(reference)
            except Exception as error:  # a function may raise any
                failures.append(_Failure(rank, error))

    deadline = None
    while pending and (deadline is None or time.monotonic() < deadline):
        receive(_POLL_S)
        if failures and deadline is None:
            deadline = time.monotonic() + GRACE_S
        if failures:
            after_failure(poll)
            continue
        try:
            poll()
        except Exception:
            # A rank may have failed in the meantime, perhaps because of what the caller sees in the report.
            while pending and not failures:
                before = len(pending)
                receive(0)
                if len(pending) == before:
                    raise
            if not failures:
                raise
            _log.exception(_AFTER)
    if not failures:
        return [results[rank] for rank in range(len(references))]
    still = [references.index(reference) for reference in pending]
    if still or any(failure.has_ended() for failure in failures):
        end()
    raise _described(failures, places, still) from failures[0].error


def after_failure(poll: Callable[[], None]) -> None:
    """Calls the function. Logs the exceptions that it raises: the failure of a rank must not be replaced by them."""
    try:
        poll()
    except Exception:  # callbacks may raise any
        _log.exception(_AFTER)


def _described(failures: Sequence[_Failure], places: Sequence[Place], still: Sequence[int]) -> WorkerError:
    """Returns the error for the caller: about the rank that failed first, not because of another one."""
    first = next((failure for failure in failures if not failure.is_of_another()), failures[0])
    place = places[first.rank]
    how = "has ended" if first.has_ended() else "failed"
    others = [f"rank {failure.rank}" for failure in failures if failure is not first]
    after = f". {', '.join(others)} failed after it" if others else ""
    ended = f". Still running after {GRACE_S:.0f} s, and ended: rank {', '.join(map(str, still))}" if still else ""
    text = _COLOUR.sub("", str(first.error))
    message = f"rank {first.rank} of {len(places)} on {place.described()} {how}{after}{ended}\n\n{text}"
    return WorkerError(message, first.rank, place.host.name)
