"""Runs a short command of the shell and returns what it prints."""

from __future__ import annotations

import io
import sys

from horovod.runner.common.util import safe_shell_exec


def execute(command: str) -> tuple[str, int] | None:
    """What the command printed, on both of its streams, and its exit status; None, and a line on standard
    error, when it cannot be started."""
    output = io.StringIO()
    try:
        status = safe_shell_exec.execute(command, stdout=output, stderr=output)
    except OSError as error:
        print(f"`{command}` cannot be started: {error}", file=sys.stderr, flush=True)
        return None
    return output.getvalue(), status
