"""Tests ronde on a GPU of this machine, and measures it. Prints a table. At most eight minutes.

    cd tests && python -m gpu

Two ranks share the GPUs, so one is enough. Each step runs real workers and sidecars; a step that fails is a
row of the table, and ends the command with status 1. Without a GPU, its driver or a PyTorch for CUDA, the command
prints why nothing was run, and ends with status 3.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

TESTS = pathlib.Path(__file__).resolve().parent.parent
WORKERS = TESTS.parent / "sdk-python" / "tests" / "workers"
HERE = pathlib.Path(__file__).resolve().parent
TIMEOUT_S = 480.0
NOT_RUN, FAILED = 3, 1

ASK = """
import ronde
from ronde import _ronde
try:
    found = _ronde.gpus()
except ronde.RondeError as error:
    raise SystemExit(str(error))
try:
    import torch
except ImportError as error:
    raise SystemExit(f"PyTorch is not installed: {error}")
if torch.version.cuda is None or not torch.cuda.is_available():
    raise SystemExit(f"PyTorch {torch.__version__} finds no GPU; install one for CUDA")
print("; ".join(f"{gpu['name']}, {gpu['memory_bytes'] >> 30} GiB" for gpu in found))
print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs")
"""


class Step(NamedTuple):
    """A job to run.

    title   -- its row
    command -- what each rank runs
    sidecars -- how many hosts the job is as if on
    staging -- who copies, as RONDE_GPU_STAGING
    """

    title: str
    command: list[str]
    sidecars: int
    staging: str = "torch"


class Row(NamedTuple):
    """A line of the table."""

    title: str
    result: str
    is_ok: bool


def main() -> int:
    """Runs all steps; returns the process's exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--ronde", default=os.environ.get("RONDE_BIN", "ronde"), help="the binary")
    given = options.parse_args()
    found = subprocess.run([sys.executable, "-c", ASK], capture_output=True, text=True, check=False, timeout=120)
    if found.returncode != 0:
        print(f"NOT RUN: {(found.stderr.strip() or found.stdout.strip()).splitlines()[-1]}", file=sys.stderr)
        return NOT_RUN
    print(found.stdout, end="", flush=True)
    until = time.monotonic() + TIMEOUT_S
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ronde-gpu-") as folder:
        for step in steps(folder):
            rows += run(given.ronde, step, until)
    print(table(rows))
    return 0 if all(row.is_ok for row in rows) else FAILED


def steps(folder: str) -> list[Step]:
    """Returns the jobs, in order."""
    collectives, training = [str(WORKERS / "torch_cuda.py")], [str(HERE / "training.py"), "cuda"]
    speed = str(HERE / "speed.py")
    made = []
    for staging in ("torch", "ronde"):
        suffix = f"RONDE_GPU_STAGING={staging}"
        made += [
            Step(f"collectives and an optimizer, one host, {suffix}", collectives, 1, staging),
            Step(f"collectives and an optimizer, two sidecars, {suffix}", collectives, 2, staging),
            Step(f"training, against one process, {suffix}", training, 2, staging),
            Step(f"speed, {suffix}", [speed, "ronde", "cuda"], 2, staging),
        ]
    return [*made, Step("speed of Gloo", [speed, "gloo", "cuda", f"{folder}/store"], 2)]


def run(ronde: str, step: Step, until: float) -> list[Row]:
    """Runs a job of two ranks. Returns its row, and one for each figure that it printed."""
    left = until - time.monotonic()
    if left <= 0:
        return [Row(step.title, f"not run: the {TIMEOUT_S:g} s of the command are over", False)]
    command = [ronde, "run", "-np", "2", "--sidecars", str(step.sidecars), sys.executable, *step.command]
    environment = {**os.environ, "RONDE_GPU_STAGING": step.staging}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left, env=environment)
    except subprocess.TimeoutExpired:
        return [Row(step.title, f"not complete after {left:.0f} s", False)]
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        return [Row(step.title, f"FAILED with status {done.returncode}; its output is above", False)]
    found = [Row(f"{title}, RONDE_GPU_STAGING={step.staging}", text, True) for title, text in figures(done.stdout)]
    return [Row(step.title, "passed", True), *found]


def figures(output: str) -> list[tuple[str, str]]:
    """Returns the figures in a job's output: lines that end in JSON after the word FIGURE."""
    marked = [line.partition("FIGURE ")[2] for line in output.splitlines() if "FIGURE " in line]
    return [(str(title), str(text)) for title, text in map(json.loads, marked)]


def table(rows: list[Row]) -> str:
    """Returns the table, in Markdown."""
    lines = [f"| {row.title} | {row.result} |" for row in rows]
    return "\n".join(["| on a GPU | |", "|---|---|", *lines])


if __name__ == "__main__":
    sys.exit(main())
