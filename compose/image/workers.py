"""Starts the workers of a pod, with their ranks, and ends with them.

    python3 workers.py COMMAND...

The variables that describe the pod are those of `pod.py`. Each worker gets RONDE_JOB, RONDE_RANK, RONDE_SIZE,
RONDE_LOCAL_RANK, RONDE_LOCAL_SIZE, and LOCAL_RANK, by which programs choose their GPU.

When a worker fails, its sidecar reports it to all others, and their errors name its rank. They have a grace period to
end by themselves; then they are ended. SIGTERM is passed on. The exit status is that of the first worker that failed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

import pod
from pod import Pod, PodError

# After the first failure, and after SIGTERM: a pod has 30 s until it is killed.
GRACE_S = 20.0
POLL_S = 0.1
USAGE = 64


def main() -> int:
    """Starts the workers and waits; returns the process's exit status."""
    command = sys.argv[1:]
    if not command or command[0] in {"-h", "--help"}:
        print(__doc__, file=sys.stdout if command else sys.stderr)
        return 0 if command else USAGE
    try:
        this = pod.of_environment(os.environ)
    except PodError as error:
        print(f"workers: nothing was started: {error}", file=sys.stderr)
        return USAGE
    return run(this, command)


def run(this: Pod, command: list[str]) -> int:
    """Runs the command once for each rank of the pod; returns the status of the first that failed, or 0."""
    workers: dict[int, subprocess.Popen[bytes]] = {}
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    try:
        for rank in this.ranks:
            workers[rank] = subprocess.Popen(command, env=environment(this, rank, os.environ))
        return wait(workers, asked)
    except OSError as error:
        print(f"workers: cannot start {command[0]!r}: {error}", file=sys.stderr)
        return 127
    finally:
        end(workers)


def environment(this: Pod, rank: int, common: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables of one worker."""
    local = rank - this.ranks.start
    numbers = {
        "RONDE_RANK": rank,
        "RONDE_SIZE": this.size,
        "RONDE_LOCAL_RANK": local,
        "RONDE_LOCAL_SIZE": this.workers,
        "LOCAL_RANK": local,
    }
    return {**common, "RONDE_JOB": this.job, **{name: str(value) for name, value in numbers.items()}}


def wait(workers: dict[int, subprocess.Popen[bytes]], asked: list[int]) -> int:
    """Waits for all workers, after a failure or a signal for a bounded time."""
    deadline, status, passed = None, 0, 0
    reported: set[int] = set()
    while True:
        running = [rank for rank, worker in workers.items() if worker.poll() is None]
        for rank, worker in workers.items():
            if worker.returncode and rank not in reported:
                reported.add(rank)
                status = status or status_of(worker.returncode)
                print(f"workers: rank {rank} {outcome(worker.returncode)}", file=sys.stderr, flush=True)
        for number in asked[passed:]:
            passed += 1
            for rank in running:
                workers[rank].send_signal(number)
        if not running:
            return status or (128 + asked[0] if asked else 0)
        if deadline is None and (status or asked):
            deadline = time.monotonic() + GRACE_S
        if deadline is not None and time.monotonic() > deadline:
            print(f"workers: ranks {running} did not end within {GRACE_S:.0f} s; they are killed", file=sys.stderr)
            return status or 128 + asked[0]
        time.sleep(POLL_S)


def status_of(code: int) -> int:
    """The exit status of a shell for this return code."""
    return code if code > 0 else 128 - code


def outcome(code: int) -> str:
    """How a worker ended, in words."""
    return f"exited with code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"


def end(workers: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Kills what still runs."""
    for worker in workers.values():
        if worker.poll() is None:
            worker.kill()
        worker.wait()


if __name__ == "__main__":
    sys.exit(main())
