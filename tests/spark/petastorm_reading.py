"""Reads a Parquet file by Petastorm, and prints rows a second: `petastorm_reading.py FILE BATCH BUFFER WORKERS`.

It runs in an environment of its own, without ronde: Petastorm needs an old PyArrow. The loader is that of Horovod's
estimators for PyTorch.
"""

from __future__ import annotations

import logging
import sys
import time
import warnings

from petastorm import make_batch_reader
from petastorm.pytorch import BatchedDataLoader


def read(path: str, batch: int, buffer: int, workers: int) -> int:
    """Reads the file once, shuffled. Returns the number of rows."""
    options = {"num_epochs": 1, "shuffle_row_groups": True, "workers_count": workers, "reader_pool_type": "thread"}
    with make_batch_reader(f"file://{path}", **options) as reader:
        loader = BatchedDataLoader(reader, batch_size=batch, shuffling_queue_capacity=buffer)
        return sum(len(each["label"]) for each in loader)


def main() -> None:
    """Reads once, and prints rows and speed."""
    # Petastorm calls what newer releases of its dependencies have deprecated.
    warnings.simplefilter("ignore")
    logging.disable()
    path, *numbers = sys.argv[1:]
    batch, buffer, workers = map(int, numbers)
    start = time.monotonic()
    rows = read(path, batch, buffer, workers)
    print(f"\n{rows} {rows / (time.monotonic() - start)}")


if __name__ == "__main__":
    main()
