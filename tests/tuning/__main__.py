"""Compares what a search finds from a wrong start with the best point of a grid, in real jobs of two ranks.

    make tuning
    cd tests && python -m tuning --samples 60 --rounds 3

`ronde tune` searches from a fusion threshold of 1 MB and chunks of 4 KiB, on two sidecars of this machine. Then each
point of the grid, the start and what the search found take turns, each in a job of its own that measures as the search
does. The ratio is the median rate of what was found over that of the best point. Below 0.9 these two take turns again,
as the best of many measurements is partly a lucky one, and the machine may have been busy. Exits with 1 if the new
ratio is below 0.9, too.
"""

from __future__ import annotations

import argparse
import csv
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Callable, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

RONDE = os.environ.get("RONDE_BIN", "ronde")
REACHED_LEAST = 0.9
PATIENCE_S = 900
MIB = 1 << 20


class Point(NamedTuple):
    """Settings that a search changes."""

    threshold: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.threshold / MIB:g} MiB, {self.chunk >> 10} KiB"


START = Point(MIB, 4 << 10)
GRID = [Point(threshold * MIB, chunk << 10) for threshold in (1, 4, 16, 64) for chunk in (4, 32, 256, 1024)]


def ronde(arguments: list[str], point: Point) -> str:
    """Runs a command with these settings as its start. Raises SystemExit with its output if it fails."""
    environment = {**os.environ, "HOROVOD_FUSION_THRESHOLD": str(point.threshold)}
    ended = subprocess.run(
        [RONDE, *arguments], env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    if ended.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {ended.returncode}:\n{ended.stdout}{ended.stderr}")
    return ended.stdout


def measured(point: Point, options: argparse.Namespace, folder: pathlib.Path) -> float:
    """The rate of a point in MB/s: the first and only sample of a search that begins there."""
    log = folder / "point.csv"
    sample = ["--autotune-warmup-samples", "1", "--autotune-bayes-opt-max-samples", "1"]
    portion = options.steps_per_sample
    sample += ["--autotune-steps-per-sample", str(portion), "--autotune-parameters", "chunk-bytes"]
    steps = str(2 * (5 * (portion + 1) + 8))
    arguments = ["run", "-np", "2", "--sidecars", "2", "--transport", "tls", "--chunk-bytes", str(point.chunk)]
    arguments += ["--autotune", "--autotune-log-file", str(log), *sample, "--", RONDE, "tune-worker"]
    ronde([*arguments, "--steps", steps, "--tensors", options.tensors], point)
    with log.open() as rows:
        return float(next(csv.DictReader(rows))["score"])


def searched(options: argparse.Namespace, folder: pathlib.Path) -> Point:
    """What a search finds from the wrong start."""
    profile = folder / "found.toml"
    arguments = ["tune", "-np", "2", "--sidecars", "2", "--transports", "tls", "--output", str(profile)]
    arguments += ["--parameters", "fusion-threshold,chunk-bytes", "--samples", str(options.samples)]
    arguments += ["--steps-per-sample", str(options.steps_per_sample), f"--run-option=--chunk-bytes={START.chunk}"]
    arguments += [f"--run-option=--fusion-threshold-mb={START.threshold // MIB}"]
    # Each tensor by itself: `tune` takes them in the form that tune-worker takes, too.
    ronde([*arguments, "--tensors", options.tensors], START)
    text = profile.read_text()

    def value(key: str) -> int:
        found = re.search(rf"^{key} = (\d+)$", text, re.MULTILINE)
        if not found:
            raise SystemExit(f"the profile has no {key}:\n{text}")
        return int(found[1])

    return Point(value("fusion-threshold-bytes"), value("chunk-bytes"))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tuning", description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=60, help="samples of the search (default: 60)")
    parser.add_argument("--steps-per-sample", type=int, default=2, help="steps of a portion (default: 2)")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each point (default: 3)")
    parser.add_argument("--grid", type=int, default=len(GRID), help="points of the grid (default: all 16)")
    default = ",".join(["65536"] * 60 + ["1048576"] * 8)
    parser.add_argument("--tensors", default=default, help="bytes of the gradients (default: 60 of 64 KiB, 8 of 1 MiB)")
    return parser.parse_args()


def in_turns(points: Sequence[Point], rounds: int, measure: Callable[[Point], float]) -> dict[Point, float]:
    """The median rate of each point. The points take turns, so that all of them meet what else the machine does."""
    rates: dict[Point, list[float]] = {point: [] for point in dict.fromkeys(points)}
    for _ in range(rounds):
        for point, of_point in rates.items():
            of_point.append(measure(point))
    return {point: statistics.median(of_point) for point, of_point in rates.items()}


def compared(found: Point, grid: Sequence[Point], rounds: int, measure: Callable[[Point], float]) -> float:
    """The rate of what was found over that of the best point of the grid and the start. Prints a table of all rates."""
    others = [START, *grid]
    medians = in_turns([*others, found], rounds, measure)
    best = max(others, key=lambda point: medians[point])
    print("| threshold, chunk | MB/s | of the best of the grid |\n|---|---:|---:|")
    for point, rate in sorted(medians.items(), key=lambda each: -each[1]):
        kind = " (found)" if point == found else " (start)" if point == START else ""
        print(f"| {point}{kind} | {rate:.0f} | {rate / medians[best]:.2f} |")
    reached = medians[found] / medians[best]
    if reached < REACHED_LEAST:
        print(f"reached: {reached:.2f} of the best point; both are measured again", flush=True)
        medians = in_turns([best, found], rounds, measure)
        reached = medians[found] / medians[best]
    return reached


def main() -> int:
    """Searches, measures, prints a table."""
    options = arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        found = searched(options, folder)
        print(f"found after at most {options.samples} samples: {found}", flush=True)
        grid = GRID[-options.grid :]
        reached = compared(found, grid, options.rounds, lambda point: measured(point, options, folder))
    load = os.getloadavg()[0]
    print(f"reached: {reached:.2f} of the best point; load {load:.1f} on {os.cpu_count()} cores")
    return 0 if reached >= REACHED_LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
