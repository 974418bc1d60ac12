"""The elastic demo: trains on handwritten digits while processes are killed and a host is added.

    make demo-elastic

Four workers on two sidecars train `elastic_digits.py`, first undisturbed. Then the same runs again, and the demo kills
a worker, a host's sidecar with its workers, and the worker of rank 0, and adds a host. It prints the memberships with
the seconds of each recovery, and draws steps over time as elastic.png if matplotlib is installed. The hosts are
addresses of this machine. The last line is the result; the exit status is not 0 if the accuracy is more than 0.02 below
that of the undisturbed run, or if the ranks' weights differ.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import NamedTuple, NoReturn

from demo import ENVIRONMENT, EXAMPLES, ROOT, Steps, ask, importable

PATIENCE_S = 120
PAUSE_S = 0.12
EPOCHS = 16
TRAINING_S = 150
DIFFERENCE_MAX = 0.02
PLOT = "elastic.png"
_SEEN = re.compile(r"worker (\d+) \(pid (\d+)\) (?:begins|continues) as rank (\d+) of (\d+)")
_REPORT = re.compile(r"rank \d+ of (\d+): test accuracy ([\d.]+), weights ([0-9a-f]+)")


def main() -> int:
    """Runs the demo. Returns the process's exit status."""
    if "RONDE_BIN" not in os.environ:
        return subprocess.run(["make", "-C", str(ROOT), "demo-elastic"], check=False).returncode
    start = time.monotonic()
    python = ask(sys.executable, str(ENVIRONMENT), "path")
    print(
        f"ronde elastic demo: about {TRAINING_S // 60 + 1} minutes on two cores, once everything is installed",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="ronde-demo-") as folder:
        steps = Steps(5, pathlib.Path(folder))
        steps.run("NumPy", [sys.executable, str(ENVIRONMENT), "base"])
        steps.run("ronde: compile", ["make", "--no-print-directory", "-C", str(ROOT), "build-demo"])
        steps.run("PyTorch and scikit-learn", [sys.executable, str(ENVIRONMENT), "training"])
        steps.line("[4/5] train with 4 workers on 2 sidecars, undisturbed")
        calm = Job(pathlib.Path(folder, "calm"), python)
        calm.finish()
        steps.line("[5/5] train again, and kill")
        disturbed = Job(pathlib.Path(folder, "disturbed"), python)
        disturb(disturbed)
        disturbed.finish()
        disturbed.explain()
        draw(disturbed, pathlib.Path(PLOT))
        is_good = disturbed.is_equal() and disturbed.accuracy() >= calm.accuracy() - DIFFERENCE_MAX
        figures = [
            f"accuracy={disturbed.accuracy():.4f} undisturbed={calm.accuracy():.4f}",
            f"digests_equal={str(disturbed.is_equal()).lower()} worst_recovery_s={disturbed.worst():.2f}",
            f"seconds={time.monotonic() - start:.0f}",
        ]
    print("RESULT", *figures)
    return 0 if is_good else 1


def disturb(job: Job) -> None:
    """Kills a worker, a sidecar with its workers, and rank 0, and adds a host; each when all others train again."""
    members = job.members(4)
    job.await_text("epoch 1 of")
    gone = {members[3].worker}
    job.note(f"SIGKILL of worker {members[3].worker}, rank 3")
    os.kill(members[3].pid, signal.SIGKILL)
    members = job.members(4, gone)
    job.train_on()
    agents = {rank: parent(member.pid) for rank, member in members.items()}
    other = max(rank for rank in agents if agents[rank] != agents[0])
    gone |= {member.worker for rank, member in members.items() if agents[rank] == agents[other]}
    job.note("SIGKILL of the sidecar of the host without rank 0, and so of its workers")
    os.kill(sidecar_of(agents[other]), signal.SIGKILL)
    members = job.members(4, gone)
    job.train_on()
    gone.add(members[0].worker)
    job.note(f"SIGKILL of worker {members[0].worker}, rank 0")
    os.kill(members[0].pid, signal.SIGKILL)
    job.members(4, gone)
    job.train_on()
    job.note("another host appears")
    job.hosts.write_text(job.hosts.read_text() + "127.0.0.3:1\n")
    job.members(5, gone)


class Member(NamedTuple):
    """A worker and its process."""

    worker: int
    pid: int


class Job:
    """An elastic job whose hosts are listed in a file.

    folder -- where its files are made
    python -- the interpreter of the workers
    """

    def __init__(self, folder: pathlib.Path, python: str) -> None:
        folder.mkdir()
        self.hosts, self.timeline, self._report = folder / "hosts", folder / "timeline", folder / "report.json"
        self.hosts.write_text("127.0.0.1:2\n127.0.0.2:2\n")
        script = folder / "hosts.sh"
        script.write_text(f"#!/bin/sh\ncat {self.hosts}\n")
        script.chmod(0o755)
        train = [str(EXAMPLES / "elastic_digits.py"), "--epochs", str(EPOCHS), "--pause", str(PAUSE_S)]
        command = [
            *(os.environ["RONDE_BIN"], "run", "-np", "4", "--min-np", "2", "--max-np", "6"),
            *("--host-discovery-script", str(script), "--blacklist-cooldown-range", "1", "4"),
            *("--report", str(self._report), python, *train, "--timeline", str(self.timeline)),
        ]
        self.notes: list[tuple[float, str]] = []
        self.began = time.monotonic()
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line.rstrip())
            if any(word in line for word in ("epoch", "continues", "test accuracy")):
                self._print(line.rstrip())

    def _print(self, text: str) -> None:
        print(f"      {time.monotonic() - self.began:6.1f} s  {text}", flush=True)

    def note(self, what: str) -> None:
        """Prints what the demo does, and keeps it for the plot."""
        self.notes.append((time.monotonic(), what))
        self._print(f"=== {what}")

    def members(self, size: int, gone: set[int] = frozenset()) -> dict[int, Member]:
        """Waits until a membership of this size trains, without the workers that are gone. Returns it by rank."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self._process.poll() is None:
            seen = [tuple(map(int, found)) for line in list(self._lines) for found in _SEEN.findall(line)]
            last = {rank: Member(worker, pid) for worker, pid, rank, of in seen[-size:] if of == size}
            if len(last) == size and not gone & {member.worker for member in last.values()}:
                return last
            time.sleep(0.05)
        return self._fail(f"the job does not train with {size} workers")

    def await_text(self, text: str) -> None:
        """Waits until the job prints a text."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self._process.poll() is None:
            if any(text in line for line in list(self._lines)):
                return
            time.sleep(0.05)
        self._fail(f"the job has not printed {text!r}")

    def train_on(self) -> None:
        """Lets the job train for a moment."""
        time.sleep(2.0)

    def finish(self) -> None:
        """Waits for the end of the job. Ends the demo if the job failed."""
        try:
            status = self._process.wait(5 * PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._fail(f"the job goes on after {5 * PATIENCE_S} s")
        self._reader.join(10)
        if status or not self.results():
            self._fail(f"the job ended with status {status}")

    def _fail(self, what: str) -> NoReturn:
        if self._process.poll() is None:
            self._process.terminate()
            self._process.wait(60)
        sys.exit("\n".join([f"{what}; its last lines:", *self._lines[-40:]]))

    def results(self) -> list[tuple[int, float, str]]:
        """Returns size, accuracy and digest of the weights, as the ranks print them at the end."""
        found = [match.groups() for line in self._lines if (match := _REPORT.search(line))]
        return [(int(size), float(accuracy), digest) for size, accuracy, digest in found]

    def accuracy(self) -> float:
        """Returns the accuracy at the end."""
        return self.results()[0][1]

    def is_equal(self) -> bool:
        """Returns whether all ranks have the same weights at the end."""
        results = self.results()
        return len(results) == results[0][0] and len({digest for _, _, digest in results}) == 1

    def memberships(self) -> list[dict]:
        """Returns the memberships of the report."""
        return json.loads(self._report.read_text())["memberships"]

    def worst(self) -> float:
        """Returns the longest time from a loss to the next membership, in seconds."""
        return max((each.get("recovery_s") or 0.0 for each in self.memberships()), default=0.0)

    def explain(self) -> None:
        """Prints the time line of the memberships."""
        print(f"\n{'membership':>10} {'at':>9} {'ranks':>6} {'recovery':>9}  cause; workers by rank")
        for each in self.memberships():
            recovery = f"{each['recovery_s']:.2f} s" if each.get("recovery_s") is not None else ""
            workers = ", ".join(map(str, each["workers"]))
            line = f"{each['number']:>10} {each['began_s']:>7.1f} s {each['ranks']:>6} {recovery:>9}"
            print(f"{line}  {each['cause']}; workers {workers}")


def parent(pid: int) -> int:
    """Returns the parent of a process."""
    return int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def sidecar_of(agent: int) -> int:
    """Returns the process of an agent's sidecar."""
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if b"sidecar" in words[1:2] and parent(int(path.name)) == agent:
                return int(path.name)
    sys.exit(f"agent {agent} has no sidecar")


def draw(job: Job, path: pathlib.Path) -> None:
    """Draws the ranks and the steps over time, if matplotlib is installed."""
    if not importable(pathlib.Path(ask(sys.executable, str(ENVIRONMENT), "path")), "matplotlib"):
        print(f"{path} is not drawn, because matplotlib is not installed")
        return
    python = ask(sys.executable, str(ENVIRONMENT), "path")
    lines = [line.split() for line in job.timeline.read_text().splitlines()]
    steps = [(float(at) - job.began, int(step), int(size)) for at, rank, size, step in lines if rank == "0"]
    notes = [(at - job.began, what) for at, what in job.notes]
    data = json.dumps({"steps": sorted(steps), "notes": notes, "path": str(path)})
    subprocess.run([python, "-c", _PLOT], input=data, text=True, check=True)
    print(f"{path} shows the steps and the ranks over time")


# Runs in the environment of the workers, which has matplotlib.
_PLOT = """
import json, sys
import matplotlib
matplotlib.use("Agg")
from matplotlib import pyplot
data = json.load(sys.stdin)
times, steps, sizes = zip(*data["steps"])
figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6), height_ratios=(2, 1), layout="constrained")
upper.plot(times, steps, ".", markersize=3, color="#0072B2")
upper.set_ylabel("step of rank 0")
lower.step(times, sizes, where="post", color="#009E73")
lower.set_ylim(0, max(sizes) + 1)
lower.set_ylabel("ranks")
lower.set_xlabel("seconds")
for at, what in data["notes"]:
    for axes in (upper, lower):
        axes.axvline(at, color="#D55E00", linewidth=1)
    upper.annotate(what, (at, upper.get_ylim()[1]), rotation=90, va="top", ha="right", fontsize=7)
figure.suptitle("Elastic training on handwritten digits")
figure.savefig(data["path"], dpi=120)
"""


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        # The processes of the steps receive the same signal and end themselves.
        sys.exit(130)
