"""Measures how many rows a second one process reads from a Parquet file: ronde, Petastorm, and a plain DataLoader.

    python tests/spark/reading.py PYTHON [--rows 400000] [--columns 32] [--batch 256] [--buffer 50000] [--rounds 5]

PYTHON is that of the environment with Petastorm, which needs an old PyArrow; `make spark-bench` makes it. All three
read the same file, shuffle it, and yield batches of tensors. ronde and Petastorm read row groups by two threads and mix
the rows of a buffer of one size; the plain DataLoader reads the file into memory. Imports are not measured. Rounds
alternate, and medians are printed with the ratios to ronde.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "sdk-python" / "python"))

from ronde.spark.data import speed  # noqa: E402

WORKERS = 2
TIMEOUT_S = 300
ATTEMPTS = 10


def by_petastorm(python: str, path: str, options: argparse.Namespace) -> float:
    """Returns the rows a second that Petastorm reads, in a process of its own."""
    command = [python, str(HERE / "petastorm_reading.py"), path]
    command += map(str, (options.batch, options.buffer, WORKERS))
    for _ in range(ATTEMPTS):
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
        rows, rate = done.stdout.splitlines()[-1].split()
        if int(rows) == options.rows:
            return float(rate)
        # Its pool takes itself for done if all row groups are handed out between two of its checks.
        print(f"Petastorm has read {rows} of {options.rows} rows; it is measured again", flush=True)
    sys.exit(f"Petastorm has not read all rows in {ATTEMPTS} attempts")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", metavar="PYTHON")
    for name, default in (("rows", 400_000), ("columns", 32), ("batch", 256), ("buffer", 50_000), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {"ronde": [], "Petastorm": [], "PyTorch's DataLoader": []}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.parquet")
        speed.write_file(path, options.rows, options.columns)
        speed.by_ronde(path, options.batch, buffer=options.buffer)
        speed.by_pytorch(path, options.batch)
        for _ in range(options.rounds):
            by_ronde = speed.measured(
                lambda path, batch: speed.by_ronde(path, batch, buffer=options.buffer), path, options.batch
            )
            rates["ronde"].append(by_ronde)
            rates["Petastorm"].append(by_petastorm(options.python, path, options))
            rates["PyTorch's DataLoader"].append(speed.measured(speed.by_pytorch, path, options.batch))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {options.rows} rows of {options.columns} values")
    for name, rate in medians.items():
        print(f"{name}: {rate:,.0f} rows/s, {min(rates[name]):,.0f} to {max(rates[name]):,.0f}")
    for name in ("Petastorm", "PyTorch's DataLoader"):
        print(f"ronde / {name}: {medians['ronde'] / medians[name]:.1f}")


if __name__ == "__main__":
    main()
