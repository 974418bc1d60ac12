"""Finds the line of the user's program that submitted an operation, for reports of stalls and failures."""

from __future__ import annotations

import functools
import os
import sys

# Modules between the user's line and this one: the package itself, and callers of its hooks.
_PASSED_OVER = ("ronde", "torch", "horovod", "jax", "optax", "flax")
# Names are relative to this directory. A program that changes its directory later gets longer names.
_DIRECTORY = os.path.join(os.getcwd(), "")


# What switches of ronde's command line take in variables, in any case.
_ON = ("1", "true", "yes", "on", "y", "t")
_OFF = ("0", "false", "no", "off", "n", "f")


def _is_wanted(variable: str | None) -> bool:
    """Parses the variable; unset and empty are on. Raises ValueError, which names it."""
    word = (variable or "1").lower()
    if word not in (*_ON, *_OFF):
        raise ValueError(f"RONDE_FLIGHT_CALL_SITES={variable} is neither true nor false; set it to 0 or 1, or unset it")
    return word in _ON


_WANTED = _is_wanted(os.environ.get("RONDE_FLIGHT_CALL_SITES"))


@functools.lru_cache(maxsize=1_024)
def _is_passed_over(module: str) -> bool:
    return module.partition(".")[0] in _PASSED_OVER


def call_site() -> str | None:
    """Returns the line of the innermost frame of the user's code, as `file:line`.

    None in a thread without such a frame, and with RONDE_FLIGHT_CALL_SITES=0.

    A gradient's hook runs in the backward pass. For tensors on CPUs, PyTorch runs hooks in the calling thread, and the
    line is the one that called `backward`.
    """
    if not _WANTED:
        return None
    frame = sys._getframe(1)
    while frame is not None:
        if not _is_passed_over(frame.f_globals.get("__name__", "")):
            file = frame.f_code.co_filename
            return f"{file[len(_DIRECTORY) :] if file.startswith(_DIRECTORY) else file}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None
