"""The process of a rank that another process supervises: `python -m ronde.cluster.rank DESCRIPTOR PARENT`.

It reads the call from its standard input, and writes the outcome to the descriptor: a header with kind and length, then
a pickled result, or why there is none. It ends with its parent.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import struct
import sys
import traceback
from typing import TYPE_CHECKING, NamedTuple

from ronde.errors import RondeError
from ronde.frameworks import open_sessions
from ronde.run import dumps
from ronde.run_worker import perform

if TYPE_CHECKING:
    from collections.abc import Sequence

HEADER = struct.Struct("<cQ")
RESULT, FAILURE = b"r", b"f"
_PR_SET_PDEATHSIG = 1
# Causes of errors that a rank raises because another one has failed.
OF_OTHERS = ("rank_lost", "sidecar_lost", "shut_down", "closed")


class Failure(NamedTuple):
    """Why a rank has no result.

    text         -- its traceback, or how its process ended
    is_of_others -- whether it failed because another rank did
    """

    text: str
    is_of_others: bool = False

    def encode(self) -> bytes:
        """Returns the failure as JSON."""
        return json.dumps(self._asdict()).encode()


def main(arguments: Sequence[str]) -> int:
    """Makes the call, and writes its result or its failure. Returns the exit status."""
    descriptor, parent = map(int, arguments)
    _end_with(parent)
    call = sys.stdin.buffer.read()
    # A function that reads its standard input finds its end, and processes that it starts do, too.
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    os.set_inheritable(descriptor, False)
    kind, content = _outcome(call)
    sys.stdout.flush()
    sys.stderr.flush()
    with open(descriptor, "wb") as outcome:
        outcome.write(HEADER.pack(kind, len(content)))
        outcome.write(content)
    return 0 if kind == RESULT else 1


def _outcome(call: bytes) -> tuple[bytes, bytes]:
    try:
        result = dumps(perform(call))
        open_sessions.end_all()
    except Exception as error:  # a function may raise any
        traceback.print_exc()
        return FAILURE, Failure(traceback.format_exc(), is_of_others(error)).encode()
    return RESULT, result


def is_of_others(error: BaseException) -> bool:
    """Returns whether an exception, or one that led to it, is of a rank whose peer has failed."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, RondeError) and cause.cause in OF_OTHERS:
            return True
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return False


def _end_with(parent: int) -> None:
    """Lets the kernel kill this process when its parent ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        raise SystemExit("the process that started this rank has ended")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
