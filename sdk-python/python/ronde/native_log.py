"""Warnings of the native client, which go to the log `ronde`: to stderr, unless the program handles it."""

from __future__ import annotations

import atexit
import logging

from ronde import _ronde

_log = logging.getLogger("ronde")


def log_warnings() -> None:
    """Logs what the native client has reported since the last call, each text once in a process.

    Waits call this, and the end of a client and of the program.
    """
    for text in _ronde.take_warnings():
        _log.warning("%s", text)


atexit.register(log_warnings)
