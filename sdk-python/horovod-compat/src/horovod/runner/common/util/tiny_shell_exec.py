"""Runs a short shell command and returns its output."""

from __future__ import annotations

import io
import sys

from horovod.runner.common.util import safe_shell_exec


def execute(command: str) -> tuple[str, int] | None:
    """Returns the command's output, of both streams, and its exit status.

    If the command cannot be started, prints a message on standard error and returns None.
    """
    output = io.StringIO()
    try:
        status = safe_shell_exec.execute(command, stdout=output, stderr=output)
    except OSError as error:
        print(f"`{command}` cannot be started: {error}", file=sys.stderr, flush=True)
        return None
    return output.getvalue(), status
