"""Shortens the last words of a rank that ends because of another one.

The launcher names the cause once, at the end of the job. A traceback of every other rank, with the cause in it again,
would hide it.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import TYPE_CHECKING

from ronde.errors import RondeError

if TYPE_CHECKING:
    from types import TracebackType

# Keeps whole tracebacks, if it is 1.
TRACEBACKS = "RONDE_TRACEBACKS"
# The launcher counts ranks that end with one of these as followers, and all others as ranks that failed, too.
_CAUSES = ("rank_lost", "sidecar_lost", "shut_down")
_OWN_MODULES = os.path.dirname(os.path.abspath(__file__)) + os.sep


def install() -> None:
    """Shortens the report of an exception that ends this program, if `ronde run` started it.

    A program that has set `sys.excepthook` keeps its own.
    """
    if is_of_launcher() and os.environ.get(TRACEBACKS) != "1" and sys.excepthook is sys.__excepthook__:
        sys.excepthook = _report


def is_of_launcher() -> bool:
    """Returns whether `ronde run` started this process, which shows the log of the sidecars."""
    return "RONDE_SIZE" in os.environ and "RONDE_TOKEN_FILE" in os.environ


def summary(error: BaseException, trace: TracebackType | None) -> str | None:
    """Returns one line for an error that another rank or a sidecar has caused; None for any other error.

    Also None if it came up while an error of the program was handled: that one would be hidden.
    """
    if not isinstance(error, RondeError) or error.cause not in _CAUSES or not _is_only_of_ronde(error):
        return None
    first = str(error).partition("\n")[0]
    frames = [frame for frame in traceback.extract_tb(trace) if not frame.filename.startswith(_OWN_MODULES)]
    site = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first}{site}"


def _is_only_of_ronde(error: BaseException) -> bool:
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        if not isinstance(link, RondeError):
            return False
        seen.add(id(link))
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return True


def _report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    line = summary(error, trace)
    if line is None:
        sys.__excepthook__(kind, error, trace)
    else:
        print(f"\n{line}" if _is_bar_open() else line, file=sys.stderr)


def _is_bar_open() -> bool:
    """Returns whether a progress bar of tqdm has the cursor in its line of standard error.

    The launcher finds the report also behind a bar of another kind.
    """
    bars = getattr(getattr(sys.modules.get("tqdm"), "tqdm", None), "_instances", ())
    # tqdm wraps the stream in an object that is equal to it.
    return any(getattr(bar, "fp", None) == sys.stderr for bar in list(bars))
