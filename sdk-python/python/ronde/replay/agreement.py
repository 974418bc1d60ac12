"""What the ranks of a new membership report to each other, and what happens to the interrupted operations. Pure.

A *commit* is an operation, or the operations of a group or of a step, whose results are given to a program together,
when all ranks have all of them (`held.py`). So if any rank has given a result to its program, no rank reports that
commit as pending. Conversely, the results of a commit that a rank reports as pending have been given to no program, and
all ranks can perform its operations again.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, NamedTuple

from ronde.errors import RondeError

if TYPE_CHECKING:
    from collections.abc import Sequence

# Reports are refused beyond this many commits; a session has fewer requests in flight.
KEYS_MAX = 1 << 20


class Report(NamedTuple):
    """What a rank reports when its session in a membership begins.

    worker  -- its worker's number
    is_new  -- whether it comes from no interrupted membership: its worker is new, or has restored a commit
    refusal -- why it cannot continue with its operations; empty if it can
    pending -- keys of its commits that are not complete here
    given   -- keys of commits of which its program has a result, though other ranks may not have it
    """

    worker: int
    is_new: bool = True
    refusal: str = ""
    pending: frozenset[str] = frozenset()
    given: frozenset[str] = frozenset()


class Verdict(NamedTuple):
    """What happens to interrupted operations. It is the same on all ranks, because it follows from all reports.

    refusal  -- why operations that would be replayed fail; None if they are replayed
    replayed -- keys of the commits to replay; others that are complete here are complete on all ranks
    workers  -- the number of each rank's worker
    """

    refusal: str | None
    replayed: frozenset[str]
    workers: tuple[int, ...]


def key_of(name: str, generation: int, occurrence: int) -> str:
    """Identifies a commit on all ranks.

    generation -- how often all ranks have joined
    occurrence -- how many commits of this name were since then, without those that failed
    """
    return hashlib.blake2b(f"{generation}\0{occurrence}\0{name}".encode(), digest_size=16).hexdigest()


def decide(reports: Sequence[Report]) -> Verdict:
    """Returns what happens to interrupted operations.

    reports -- those of all ranks of the new membership, in rank order
    """
    replayed: frozenset[str] = frozenset().union(*(report.pending for report in reports))
    return Verdict(_refusal(reports, replayed), replayed, tuple(report.worker for report in reports))


def _refusal(reports: Sequence[Report], replayed: frozenset[str]) -> str | None:
    if all(report.is_new for report in reports):
        return None
    for rank, report in enumerate(reports):
        if report.is_new:
            return f"rank {rank} of the new membership is a new worker, or has restored a commit"
        if report.refusal:
            return f"rank {rank} cannot continue, because {report.refusal}"
        if report.given & replayed:
            return f"the program of rank {rank} has read a result early that another rank does not have"
    return None


def encode(report: Report) -> bytes:
    """Returns a report as one line of text."""
    parts = [report.worker, report.is_new, report.refusal, sorted(report.pending), sorted(report.given)]
    return json.dumps(parts).encode() + b"\n"


def decode(lines: bytes) -> list[Report]:
    """Returns the reports of all ranks. Raises RondeError with the cause "protocol" if one is malformed."""
    return [_decoded(rank, line) for rank, line in enumerate(lines.splitlines())]


def _decoded(rank: int, line: bytes) -> Report:
    try:
        worker, is_new, refusal, pending, given = json.loads(line)
        report = Report(_number(worker), bool(is_new), str(refusal), _keys(pending), _keys(given))
    except (ValueError, TypeError) as error:
        text = (
            f"rank {rank} has sent a malformed report about interrupted operations ({error}); use one release of ronde"
        )
        raise RondeError(text, "protocol", rank, blame="peer") from error
    return report


def _number(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < 1 << 32:
        raise ValueError(f"{value!r} is no number of a worker")
    return value


def _keys(values: Any) -> frozenset[str]:
    if not isinstance(values, list) or len(values) > KEYS_MAX or not all(isinstance(each, str) for each in values):
        raise ValueError("keys of operations are a list of strings")
    return frozenset(values)
