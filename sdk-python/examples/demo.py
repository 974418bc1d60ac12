"""The demo: sets up, trains on handwritten digits with and without ronde, and compares.

    make demo

It requires Linux, cargo, a C compiler and Python. It downloads the rest and caches it outside of the checkout. Four
workers with disjoint shards of the images train a small network (train_digits.py) on two sidecars connected by QUIC;
then a single process trains the same. The last line is the result. The exit status is not 0 if the accuracy is below
0.96 or the ranks' weights differ.
"""

from __future__ import annotations

import collections
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time

EXAMPLES = pathlib.Path(__file__).resolve().parent
ROOT = EXAMPLES.parent.parent
ENVIRONMENT = ROOT / "tests" / "setup" / "environment.py"
ACCURACY_MIN = 0.96
RANKS = 4
SIDECARS = 2
# The time of both trainings together, on two cores.
TRAINING_MINUTES = 0.5


def main() -> int:
    """Runs the demo. Returns the process's exit status."""
    if "RONDE_BIN" not in os.environ:
        return subprocess.run(["make", "-C", str(ROOT), "demo"], check=False).returncode
    start = time.monotonic()
    python = ask(sys.executable, str(ENVIRONMENT), "path")
    print(announcement(pathlib.Path(python).parent.parent), flush=True)
    ronde = os.environ["RONDE_BIN"]
    with tempfile.TemporaryDirectory(prefix="ronde-demo-") as folder:
        steps = Steps(6, pathlib.Path(folder))
        steps.run("NumPy", [sys.executable, str(ENVIRONMENT), "base"])
        steps.run("ronde: compile", ["make", "--no-print-directory", "-C", str(ROOT), "build-demo"])
        one_tensor = [ronde, "run", "-np", "2", "--sidecars", "2", python, str(EXAMPLES / "allreduce.py")]
        steps.run("one NumPy all-reduce, 2 workers, 2 sidecars", one_tensor, show="rank ")
        steps.run("PyTorch and scikit-learn", [sys.executable, str(ENVIRONMENT), "training"])
        report = pathlib.Path(folder, "job.json")
        many = pathlib.Path(folder, "many.json")
        alone = pathlib.Path(folder, "alone.json")
        train = [python, str(EXAMPLES / "train_digits.py"), "--report"]
        job = [ronde, "run", "-np", str(RANKS), "--sidecars", str(SIDECARS), "--report", str(report), *train, str(many)]
        steps.run(f"train with {RANKS} workers on {SIDECARS} sidecars", job, show="test accuracy")
        steps.run("train with one process alone", [*train, str(alone), "--single"], show="test accuracy")
        outcome = Outcome(*(json.loads(path.read_text()) for path in (report, many, alone)))
    outcome.explain()
    print(outcome.result(time.monotonic() - start))
    return 0 if outcome.is_good() else 1


def announcement(environment: pathlib.Path) -> str:
    """Returns the first line: the download, disk space and expected minutes of the missing parts."""
    parts = []  # what, download in MB, disk in MB, minutes on two cores
    if not pathlib.Path(os.environ["RONDE_BIN"]).exists():
        parts.append(("Rust crates", 45, 1100, 5))
    if not (environment / ".base").exists():
        parts.append(("NumPy", 20, 80, 0.2))
    if not (environment / ".training").exists():
        torch = importable(pathlib.Path(sys.executable), "torch")
        parts.append(("scikit-learn", 55, 220, 0.2) if torch else ("PyTorch and scikit-learn", 620, 1550, 1.5))
    download, disk, minutes = (sum(part[index] for part in parts) for index in (1, 2, 3))
    what = ", ".join(part[0] for part in parts)
    fetched = f"downloads up to {size(download)} ({what})" if parts else "downloads nothing"
    expected = round(minutes + TRAINING_MINUTES)
    duration = f"about {expected} minutes" if expected > 1 else "about a minute"
    return f"ronde demo: {fetched}, takes {size(disk)} of disk, {duration} on two cores."


def importable(python: pathlib.Path, module: str) -> bool:
    """Returns whether a Python has a module, without loading it."""
    find = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", find], check=False).returncode == 0


def size(megabytes: int) -> str:
    """Formats a size with a unit."""
    return f"{megabytes / 1000:.1f} GB" if megabytes >= 1000 else f"{megabytes} MB"


def ask(*command: str) -> str:
    """Returns a command's output."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Steps:
    """Runs commands one after the other and shows their progress: one updated line on a terminal, else lines."""

    def __init__(self, total: int, folder: pathlib.Path) -> None:
        self.total = total
        self.number = 0
        self.folder = folder
        self.is_terminal = sys.stdout.isatty()

    def run(self, title: str, command: list[str], show: str | None = None) -> None:
        """Runs one step and shows output lines that contain `show`. Ends the demo if the command fails."""
        self.number += 1
        label = f"[{self.number}/{self.total}] {title}"
        start = time.monotonic()
        if not self.is_terminal:
            print(label, flush=True)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        output = Output(process, show)
        while output.is_open(0.1 if self.is_terminal else 15.0):
            for line in output.take():
                self.line(f"      {line}")
            self.progress(label, time.monotonic() - start, output.latest)
        for line in output.take():
            self.line(f"      {line}")
        status = process.wait()
        if status:
            self.line(f"{label}: failed with status {status}; the last lines of `{' '.join(command)}`:")
            sys.exit("\n".join(output.last))
        self.line(f"{label}: done in {time.monotonic() - start:.0f} s")

    def progress(self, label: str, seconds: float, latest: str) -> None:
        """Updates the progress of the step."""
        clock = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
        if self.is_terminal:
            width = shutil.get_terminal_size().columns - 1
            spin = "|/-\\"[int(seconds * 8) % 4]
            print("\r" + f"{label} {spin} {clock} {latest}"[:width].ljust(width), end="", flush=True)
        elif seconds > 1:
            print(f"      {clock} {latest[:90]}", flush=True)

    def line(self, text: str) -> None:
        """Prints a permanent line."""
        if self.is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + " " * width + "\r", end="")
        print(text, flush=True)


class Output:
    """Reads the output of a process as it arrives."""

    def __init__(self, process: subprocess.Popen[str], show: str | None) -> None:
        self.latest = ""
        self.last: collections.deque[str] = collections.deque(maxlen=40)
        self._shown: collections.deque[str] = collections.deque()
        self._show = show
        self._reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._reader.start()

    def is_open(self, patience_s: float) -> bool:
        """Waits for the end, for at most `patience_s`. Returns whether the process still runs."""
        self._reader.join(patience_s)
        return self._reader.is_alive()

    def take(self) -> list[str]:
        """Returns the lines to show since the last call."""
        return [self._shown.popleft() for _ in range(len(self._shown))]

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.latest = line.strip() or self.latest
            self.last.append(line.rstrip())
            if self._show and self._show in line:
                self._shown.append(line.rstrip())


class Outcome:
    """The report of the training, and that of a single process, if it ran."""

    def __init__(self, job: dict, many: dict, alone: dict | None = None) -> None:
        self.job, self.many, self.alone = job, many, alone
        self.summaries = [sidecar["summary"] for sidecar in job["sidecars"]]
        self.sealed_bytes = sum(summary["sealed_bytes"] for summary in self.summaries)
        self.accuracy = many["epochs"][-1]["accuracy"]
        self.digests_equal = len({rank["digest"] for rank in many["ranks"]}) == 1

    def is_good(self) -> bool:
        """Returns whether the training met its targets."""
        return self.accuracy >= ACCURACY_MIN and self.digests_equal

    def explain(self) -> None:
        """Prints both trainings, and figures of the sidecars."""
        workers = f"{len(self.many['ranks'])} workers, {len(self.summaries)} sidecars"
        trainings = [(workers, self.many), *([("one process alone", self.alone)] if self.alone else [])]
        print(f"\n{'':8}" + "".join(f"{title:>26}" for title, _ in trainings))
        print(f"{'epoch':8}" + f"{'loss':>13}{'accuracy':>13}" * len(trainings))
        for number, epochs in enumerate(zip(*(training["epochs"] for _, training in trainings)), 1):
            figures = [figure for epoch in epochs for figure in (epoch["loss"], epoch["accuracy"])]
            print(f"{number:<8}" + "".join(f"{figure:13.4f}" for figure in figures))
        print()
        for rank in self.many["ranks"]:
            print(f"rank {rank['rank']}: weights {rank['digest'][:16]}, waiting {rank['waiting']:.0%} of the time")
        for sidecar, summary in zip(self.job["sidecars"], self.summaries):
            tensors, operations = summary["tensors"], summary["operations"]
            fused = f"{tensors} tensors fused into {operations} operations"
            print(f"sidecar {sidecar['sidecar']}: sealed {summary['sealed_bytes']:,} bytes, {fused}")
        late = max((summary["last_to_be_ready"] for summary in self.summaries), key=sum)
        if sum(late):
            slowest = late.index(max(late))
            print(f"slowest rank: {slowest}, the last to be ready for {max(late) / sum(late):.0%} of the tensors")

    def result(self, seconds: float) -> str:
        """The last line."""
        equal = str(self.digests_equal).lower()
        figures = f"accuracy={self.accuracy:.4f} digests_equal={equal} sealed_bytes={self.sealed_bytes}"
        return f"RESULT {figures} seconds={seconds:.0f}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        # The processes of the steps receive the same signal and end themselves.
        sys.exit(130)
