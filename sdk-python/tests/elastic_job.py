"""An elastic job of real processes, whose output is read while it runs."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from conftest import PACKAGE, ronde_binary
from process_tree import sidecar_beside

if TYPE_CHECKING:
    from collections.abc import Sequence

EXAMPLES = PACKAGE.parent / "examples"
COMPAT = PACKAGE.parent / "horovod-compat" / "src"
PATIENCE_S = 150
_SEEN = re.compile(r"worker (\d+) \(pid (\d+)\) (begins|continues) as rank (\d+) of (\d+)")
_REPORT = re.compile(r"rank (\d+) of (\d+): test accuracy ([\d.]+), weights (\w+)")


class Hosts:
    """A discovery script, and the file from which it prints.

    folder -- for both
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.file, self.script = folder / "hosts", folder / "hosts.sh"
        self.runs(f"cat {self.file}")

    def set(self, *lines: str) -> None:
        """Replaces the hosts."""
        _replace(self.file, "".join(f"{line}\n" for line in lines))

    def runs(self, command: str) -> None:
        """Replaces the script."""
        _replace(self.script, f"#!/bin/sh\n{command}\n")


def _replace(path: pathlib.Path, text: str) -> None:
    """Writes a file that may be read or run meanwhile."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.chmod(0o755)
    fresh.rename(path)


class Seen(NamedTuple):
    """A worker that has printed its rank."""

    worker: int
    pid: int
    how: str
    rank: int
    size: int


class Report(NamedTuple):
    """What a rank printed at the end."""

    rank: int
    size: int
    accuracy: float
    digest: str


class ElasticJob:
    """A job, which is killed at the end of the block if it still runs.

    The example trains until `finish`, so that whatever happens to its workers comes before its end.

    options -- of `ronde run`
    command -- of the workers, for this Python; default: the example
    within  -- the command by which another one runs where the job is to start, such as on another host
    """

    def __init__(self, options: Sequence[str], command: Sequence[str] = (), within: Sequence[str] = ()) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="rt-")
        self._end = pathlib.Path(self._folder.name) / "end"
        example = [str(EXAMPLES / "elastic_digits.py"), "--epochs", "4", "--pause", "0.15", "--until", str(self._end)]
        worker = command or example
        self.command = [*within, ronde_binary(), "run", *options, sys.executable, *worker]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{PACKAGE}{os.pathsep}{COMPAT}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )
        self._lines: list[str] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> ElasticJob:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(20)
        self._folder.cleanup()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    @property
    def output(self) -> str:
        """Everything that was printed until now."""
        with self._changed:
            return "".join(self._lines)

    def await_text(self, pattern: str, count: int = 1) -> list[re.Match[str]]:
        """Waits until the output contains a pattern so often. Returns the matches."""
        deadline = time.monotonic() + PATIENCE_S
        with self._changed:
            while True:
                found = list(re.finditer(pattern, "".join(self._lines)))
                if len(found) >= count:
                    return found
                left = deadline - time.monotonic()
                has_ended = self.process.poll() is not None and not self._reader.is_alive()
                if left <= 0 or has_ended:
                    why = "has ended" if has_ended else f"has printed nothing like it for {PATIENCE_S} s"
                    raise AssertionError(f"the job {why}: {pattern!r} {count} times\n{''.join(self._lines)}")
                self._changed.wait(min(left, 1.0))

    def seen(self) -> list[Seen]:
        """The workers that have printed their rank, in the order of their lines."""
        return [Seen(int(w), int(p), how, int(r), int(s)) for w, p, how, r, s in _SEEN.findall(self.output)]

    def await_size(self, size: int, rank: int = 0) -> Seen:
        """Waits until a rank of a membership of this size has begun or continues after the last one of another size."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            last = {each.rank: each for each in self.seen() if each.size == size}
            everybody = self.seen()
            is_current = bool(everybody) and all(each.size == size for each in everybody[-size:])
            if is_current and len(last) == size:
                return last[rank]
            assert self.process.poll() is None, f"the job has ended\n{self.output}"
            time.sleep(0.05)
        raise AssertionError(f"no membership of {size} workers\n{self.output}")

    def kill(self, pid: int) -> None:
        """Kills a process of the job."""
        os.kill(pid, signal.SIGKILL)

    def sidecar_of(self, worker: Seen) -> int:
        """Returns the process of the sidecar of a worker."""
        found = sidecar_beside(worker.pid)
        assert found is not None, f"no sidecar beside worker {worker}\n{self.output}"
        return found

    def status(self) -> int:
        """Waits for the end. Returns the exit status."""
        try:
            status = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job goes on after {PATIENCE_S} s\n{self.output}") from None
        self._reader.join(20)
        return status

    def finish(self) -> list[Report]:
        """Lets the example end, which must be a success with the same weights everywhere. Returns its reports."""
        self._end.touch()
        status = self.status()
        assert status == 0, f"{' '.join(self.command)} ended with {status}\n{self.output}"
        found = [Report(int(r), int(s), float(a), d) for r, s, a, d in _REPORT.findall(self.output)]
        assert found, self.output
        assert sorted(each.rank for each in found) == list(range(found[0].size)), self.output
        assert len({each.digest for each in found}) == 1, self.output
        assert min(each.accuracy for each in found) > 0.85, self.output
        return found
