"""In-place replay: all-reduces that a lost rank has interrupted complete over the ranks that remain.

docs/adr/0027 explains the design. `Replay` performs it for a client that `connect(on_failure="continue")` returns.

| file | what |
|---|---|
| `agreement.py` | what the ranks report to each other after a loss, and what follows from it; pure |
| `held.py` | an operation whose result is held until all ranks have it, and the commit of several of them |
| `session.py` | the session with the sidecar, which is replaced when a rank is lost |
"""

from ronde.replay.agreement import Report, Verdict, decide
from ronde.replay.held import Commit, HeldOperation, Request
from ronde.replay.session import CONTINUE, ON_FAILURE, RAISE, Replay

__all__ = [
    "CONTINUE",
    "ON_FAILURE",
    "RAISE",
    "Commit",
    "HeldOperation",
    "Replay",
    "Report",
    "Request",
    "Verdict",
    "decide",
]
