"""Kills processes of an elastic job on this machine, one after the other, and measures how long the others need.

    cd tests && python -m kills --kills 200
    cd tests && python -m kills --kinds rank0 --kills 20 --parameters 100000

Workers train a perceptron on two sidecars of this machine, as if it were two hosts, and compare their weights after
each step. Kinds take turns: a worker that is not rank 0, rank 0, and the sidecar of rank 0, which takes its workers
with it. A time is from SIGKILL until the last survivor has completed its next step. The table has a row for each kind,
and one for new workers: from the start of training in their process until their first step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

TESTS = pathlib.Path(__file__).resolve().parent.parent
sys.path.append(str(TESTS.parent / "sdk-python" / "tests"))
from process_tree import parent, sidecar_beside  # noqa: E402

KINDS = ("worker", "rank0", "sidecar0")
TITLES = {
    "worker": "a worker",
    "rank0": "the worker of rank 0",
    "sidecar0": "the sidecar of rank 0, with its workers",
    "new": "a new worker: from its begin to its first step",
}
PATIENCE_S = 120


class Line(NamedTuple):
    """What a worker noted."""

    event: str
    at: float
    worker: int
    pid: int
    rank: int
    size: int
    step: int


class Job:
    """The job, and what its workers have noted."""

    def __init__(self, folder: pathlib.Path, options: argparse.Namespace) -> None:
        self.file = folder / "steps"
        self.file.touch()
        self.size = options.workers
        half = self.size // 2
        hosts = f"127.0.0.1:{self.size - half},127.0.0.2:{half}"
        self.output = (folder / "output").open("w+")
        command = [
            *(os.environ.get("RONDE_BIN", "ronde"), "run", "-np", str(self.size), "--min-np", "1", "-H", hosts),
            *("--blacklist-cooldown-range", "1", "2", sys.executable, str(TESTS / "kills" / "worker.py")),
            *(str(self.file), str(options.parameters), str(options.commit_every)),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT, env=environment)
        self._read = 0
        self.lines: list[Line] = []

    def update(self) -> None:
        """Reads what is new. Raises SystemExit if the job has ended."""
        with self.file.open("rb") as file:
            file.seek(self._read)
            content = file.read()
        end = content.rfind(b"\n") + 1
        self._read += end
        for text in content[:end].decode().splitlines():
            event, at, worker, pid, rank, size, step = text.split()
            self.lines.append(Line(event, float(at), int(worker), int(pid), int(rank), int(size), int(step)))
        if self.process.poll() is not None or any(line.event == "different" for line in self.lines[-64:]):
            raise SystemExit(f"the job has ended:\n{self.tail()}")

    def tail(self) -> str:
        """The last lines of the job's output."""
        self.output.flush()
        return "\n".join(pathlib.Path(self.output.name).read_text().splitlines()[-25:])

    def members(self) -> dict[int, Line]:
        """The newest line of each rank, if all of them are of a complete job; else nothing."""
        newest: dict[int, Line] = {}
        for line in reversed(self.lines):
            if line.event != "step" or line.size != self.size:
                break
            newest.setdefault(line.rank, line)
        return newest if len(newest) == self.size else {}

    def await_complete(self) -> dict[int, Line]:
        """Waits until all workers train. Returns the newest line of each rank."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.update()
            if members := self.members():
                return members
            time.sleep(0.02)
        raise SystemExit(f"not all workers train after {PATIENCE_S} s:\n{self.tail()}")

    def recovery(self, survivors: set[int], killed_at: float) -> float:
        """Waits until all survivors have completed a step. Returns the seconds since then."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.update()
            steps: dict[int, float] = {}
            renewed = {each.worker: each.at for each in self.lines if each.event == "continue" and each.at > killed_at}
            for line in self.lines:
                began = renewed.get(line.worker)
                if line.event == "step" and began is not None and line.at > began:
                    steps.setdefault(line.worker, line.at)
            if survivors <= set(steps):
                return max(steps[worker] for worker in survivors) - killed_at
            time.sleep(0.005)
        raise SystemExit(f"the survivors do not train {PATIENCE_S} s after a kill:\n{self.tail()}")

    def lost_commits(self) -> list[Line]:
        """Steps that were done again although they were committed on all ranks before."""
        committed, lost = 0, []
        pending: dict[int, set[int]] = {}
        for line in self.lines:
            if line.event == "commit":
                pending.setdefault(line.step, set()).add(line.rank)
                if len(pending[line.step]) == line.size:
                    committed = max(committed, line.step)
            elif line.event == "step" and line.step <= committed:
                lost.append(line)
        return lost

    def end(self) -> None:
        """Ends the job, in order if it goes on."""
        pathlib.Path(f"{self.file}.stop").touch()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(30)
        self.output.close()


def sidecar_of(worker: Line) -> int:
    """Returns the process of the sidecar of a worker."""
    found = sidecar_beside(worker.pid)
    if found is None:
        raise SystemExit(f"there is no sidecar beside worker {worker.worker}")
    return found


def kill(job: Job, kind: str) -> float:
    """Kills a process of a job in which all workers train. Returns the seconds of the recovery."""
    members = job.await_complete()
    zero = members[0]
    lost = {zero.worker}
    if kind == "worker":
        victim = members[job.size - 1]
        lost, target = {victim.worker}, victim.pid
    elif kind == "rank0":
        target = zero.pid
    else:
        target, agent = sidecar_of(zero), parent(zero.pid)
        lost = {member.worker for member in members.values() if parent(member.pid) == agent}
    at = time.monotonic()
    os.kill(target, signal.SIGKILL)
    return job.recovery({member.worker for member in members.values()} - lost, at)


def first_steps(lines: list[Line]) -> list[float]:
    """Returns how long workers that came later took from their begin to their first step."""
    begun = {line.worker: line.at for line in lines if line.event == "begin"}
    first: dict[int, float] = {}
    for line in lines:
        if line.event == "step":
            first.setdefault(line.worker, line.at)
    initial = {line.worker for line in lines if line.event == "begin" and line.step == 0 and line.worker < line.size}
    return [first[worker] - at for worker, at in begun.items() if worker in first and worker not in initial]


def table(times: dict[str, list[float]]) -> str:
    """Returns the table in Markdown."""
    rows = ["| killed | times | median | 90 % | worst |", "|---|---:|---:|---:|---:|"]
    for kind, each in times.items():
        if each:
            ordered = sorted(each)
            figures = (statistics.median(ordered), ordered[int(0.9 * (len(ordered) - 1))], ordered[-1])
            rows.append(
                f"| {TITLES[kind]} | {len(each)} | " + " | ".join(f"{figure:.2f} s" for figure in figures) + " |"
            )
    return "\n".join(rows)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--commit-every", type=int, default=1, metavar="STEPS")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="where all times are written")
    return parser.parse_args()


def main() -> int:
    """Runs the kills. Returns the exit status: 0 if all survivors recovered and no committed step was lost."""
    options = arguments()
    times: dict[str, list[float]] = {kind: [] for kind in options.kinds}
    with tempfile.TemporaryDirectory(prefix="ronde-kills-") as folder:
        job = Job(pathlib.Path(folder), options)
        try:
            for number in range(options.kills):
                kind = options.kinds[number % len(options.kinds)]
                seconds = kill(job, kind)
                times[kind].append(seconds)
                print(f"{number + 1:4} of {options.kills}: {TITLES[kind]}: {seconds:.2f} s", flush=True)
            job.await_complete()
        finally:
            job.end()
        lost = job.lost_commits()
        steps = max((line.step for line in job.lines), default=0)
        new = first_steps(job.lines)
    print(f"\n{table({**times, 'new': new})}\n")
    print(f"{steps} steps; all ranks had equal weights after each; {len(lost)} committed steps were done again")
    if options.json:
        options.json.write_text(json.dumps({**times, "new": new}))
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
