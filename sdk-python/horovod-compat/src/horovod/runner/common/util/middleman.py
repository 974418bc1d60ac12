"""Runs a shell command in a new session, and ends all its processes on request or when the parent dies.

    python middleman.py FD GRACE_S COMMAND

FD      -- the reading end of a pipe: a byte on it, or its end, ends the command
GRACE_S -- the seconds between SIGTERM and SIGKILL

It imports only Python's own modules, so that it starts quickly. It exits with the command's status, or 128 + N if
signal N ended it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

POLL_S = 0.02
POLL_MAX_S = 1.0


def main(control: int, grace_s: float, command: str) -> int:
    """Runs the command. Returns the exit status."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    # The parent handles an interrupt at the terminal, and then closes the pipe. The command does not inherit handlers.
    for number in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    process = subprocess.Popen(command, shell=True, start_new_session=True)
    while process.poll() is None:
        ready, _, _ = select.select([control, reading], [], [], POLL_MAX_S)
        if control in ready or asked:
            end(process, grace_s)
            break
        if reading in ready:
            os.read(reading, 4096)
    status = process.wait()
    # Background processes of the shell must not outlive it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Sends SIGTERM to all processes of the command's group, and after the grace SIGKILL to the rest."""
    deadline = time.monotonic() + grace_s
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        while number == signal.SIGTERM and process.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]))
