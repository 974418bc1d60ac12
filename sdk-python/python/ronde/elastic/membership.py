"""Whether this process is a worker of an elastic job, and how it waits for the job's next membership."""

from __future__ import annotations

import os
import time
from typing import Callable, TypeVar

from ronde.errors import PeerLostError, RondeError, ShutDownError, TimedOutError

TIMEOUT_S_DEFAULT = 600.0
# `ronde run` sets it to `--elastic-timeout` or more.
_TIMEOUT_VARIABLE = "RONDE_START_TIMEOUT"
_WORKER_VARIABLE = "RONDE_WORKER"
_MAX_SIZE_VARIABLE = "RONDE_MAX_NP"
# Workers wait longer than the launcher, whose error names how many slots are missing.
_MARGIN_S = 30.0
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.05, 1.0
_REMOVED = "removed from elastic job"

Session = TypeVar("Session")


def is_elastic() -> bool:
    """Returns whether this process is a worker of an elastic job, which `ronde run --min-np` starts."""
    return os.environ.get("RONDE_ELASTIC") == "1"


def is_new_worker() -> bool:
    """Returns whether this worker came to a job that trained already, whose state it does not have."""
    return os.environ.get("RONDE_NEW_WORKER") == "1"


def worker_number() -> int:
    """Returns the number of this worker, which it keeps while its rank changes.

    Raises ValueError if RONDE_WORKER, which `ronde run` sets in elastic jobs, is not a number.
    """
    text = os.environ.get(_WORKER_VARIABLE, "")
    if not text.isdecimal():
        raise ValueError(f"{_WORKER_VARIABLE} is {text!r}; leave it as `ronde run` sets it in an elastic job")
    return int(text)


def max_size() -> int | None:
    """Returns the largest number of workers of this elastic job (`--max-np`); None in other jobs and without a limit.

    Raises ValueError if RONDE_MAX_NP, which `ronde run` sets in elastic jobs, is not a number.
    """
    given = os.environ.get(_MAX_SIZE_VARIABLE) if is_elastic() else None
    return None if given is None else int(given)


def timeout_s() -> float:
    """Returns how long a worker waits for a membership, in seconds: the job's `--elastic-timeout` and a margin.

    Raises ValueError if the variable that contains it is not a number above 0.
    """
    text = os.environ.get(_TIMEOUT_VARIABLE)
    if not text:
        return TIMEOUT_S_DEFAULT + _MARGIN_S
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{_TIMEOUT_VARIABLE} is {text!r}; give a number of seconds above 0")
    return seconds + _MARGIN_S


def connected(connect: Callable[[], Session], clock: Callable[[], float] = time.monotonic) -> Session:
    """Returns the session of `connect`. In an elastic job it waits for a membership that includes this worker.

    A membership may lose a worker before its epoch begins; then the job gets another one, and this function tries
    again until the elastic timeout is over. Raises what `connect` does.
    """
    if not is_elastic():
        return connect()
    deadline, pause_s = clock() + timeout_s(), _PAUSE_MIN_S
    while True:
        try:
            return connect()
        except (PeerLostError, ShutDownError, TimedOutError) as error:
            if is_removal(error) or clock() + pause_s > deadline:
                raise
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)


def is_removal(error: RondeError) -> bool:
    """Returns whether an error of `connect` means that the job continues without this worker."""
    return _REMOVED in str(error)
