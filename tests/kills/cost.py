"""Measures what an elastic job costs without faults, beside a fixed one: `cd tests && python -m kills.cost`.

Both train the same perceptron on two sidecars of this machine. Jobs take turns; a figure is the median of all steps of
all rounds, each step as long as its slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

WAYS = {
    "fixed": "a fixed job",
    "checks": "elastic, `check_host_updates` after each step",
    "commits": "elastic, `commit` after each step",
}
_TIMEOUT_S = 600


def steps_of(way: str, options: argparse.Namespace) -> list[float]:
    """Runs a job. Returns the seconds of each step. Raises SystemExit if it fails."""
    half = options.workers // 2
    hosts = f"127.0.0.1:{options.workers - half},127.0.0.2:{half}"
    worker = pathlib.Path(__file__).with_name("cost_worker.py")
    with tempfile.TemporaryDirectory(prefix="ronde-cost-") as folder:
        command = [os.environ.get("RONDE_BIN", "ronde"), "run", "-np", str(options.workers), "-H", hosts]
        command += [] if way == "fixed" else ["--min-np", "1"]
        command += [sys.executable, str(worker), folder, str(options.parameters), str(options.steps), way]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"the job has failed ({way}):\n{done.stdout}")
        ranks = [json.loads(pathlib.Path(folder, str(rank)).read_text()) for rank in range(options.workers)]
    return [max(each) for each in zip(*ranks)]


def main() -> int:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=6)
    options = parser.parse_args()
    times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS:
            times[way].append(steps_of(way, options))
        ratios = [statistics.median(times[way][-1]) / statistics.median(times["fixed"][-1]) for way in WAYS]
        print(f"round {number + 1} of {options.rounds}: " + ", ".join(f"{ratio:.3f}" for ratio in ratios), flush=True)
    print("| job | step, median | step, least | to the fixed job, median of the rounds |\n|---|---:|---:|---:|")
    for way, title in WAYS.items():
        steps = [step for each in times[way] for step in each]
        pairs = zip(times[way], times["fixed"])
        ratio = statistics.median(statistics.median(each) / statistics.median(fixed) for each, fixed in pairs)
        print(f"| {title} | {statistics.median(steps) * 1e3:.1f} ms | {min(steps) * 1e3:.1f} ms | {ratio:.3f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
