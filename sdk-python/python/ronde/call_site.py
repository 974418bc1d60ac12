"""Where in the user's program an operation was asked for: for reports of stalls and failures."""

from __future__ import annotations

import functools
import os
import sys

# Between the user's line and this module: the package itself, and who calls it back.
_PASSED_OVER = ("ronde", "torch", "horovod")
# Where relative names begin; a program that changes it later has longer names, which is no harm.
_DIRECTORY = os.path.join(os.getcwd(), "")


@functools.lru_cache(maxsize=1_024)
def _is_passed_over(module: str) -> bool:
    return module.partition(".")[0] in _PASSED_OVER


def call_site() -> str | None:
    """The line of the innermost frame that is the user's, as `file:line`; None in a thread that has none.

    A gradient's hook runs in the backward pass, so it is the line that called that, where PyTorch runs hooks in the
    same thread, as it does for tensors on CPUs.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if not _is_passed_over(frame.f_globals.get("__name__", "")):
            file = frame.f_code.co_filename
            return f"{file[len(_DIRECTORY) :] if file.startswith(_DIRECTORY) else file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None
