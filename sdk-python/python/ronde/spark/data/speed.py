"""Measures how many rows a second one process reads from Parquet, beside a plain DataLoader of PyTorch.

    python -m ronde.spark.data.speed [--rows 400000] [--columns 32] [--batch 256] [--rounds 5]

The rows have float32 features in one list column, and a label. Both loaders shuffle and yield batches of tensors, and
start with the file: the plain one reads it into memory and lets PyTorch collate the rows. Rounds alternate, and the
medians are printed with their ratio.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from typing import Any, Callable

import numpy
import pyarrow
import pyarrow.parquet

ROW_GROUP_ROWS = 50_000


def write_file(path: str, rows: int, columns: int) -> None:
    """Writes a file with row groups of 50,000 rows."""
    values = numpy.random.default_rng(0).random(rows * columns, dtype=numpy.float32)
    features = pyarrow.ListArray.from_arrays(numpy.arange(0, rows * columns + 1, columns, dtype=numpy.int32), values)
    table = pyarrow.table({"features": features, "label": numpy.arange(rows) % 10})
    pyarrow.parquet.write_table(table, path, row_group_size=ROW_GROUP_ROWS)


def by_ronde(path: str, batch: int, prefetched: int = 16, buffer: int | None = None) -> int:
    """Reads the file once by an AsyncParquetDataLoader, with a shuffling buffer. Returns the number of rows."""
    from ronde.spark.data import AsyncParquetDataLoader, ShardReader
    from ronde.spark.torch.batches import tensor_of

    reader = ShardReader(path)
    loader = AsyncParquetDataLoader(
        async_loader_queue_size=prefetched, reader=reader, batch_size=batch, shuffle=True, buffer_rows=buffer
    )
    rows = 0
    for columns in loader:
        tensors = [tensor_of(array) for array in columns.values()]
        rows += len(tensors[0])
    reader.close()
    return rows


def by_pytorch(path: str, batch: int, workers: int = 0) -> int:
    """Reads the file once by a DataLoader over its rows. Returns the number of rows."""
    import torch

    table = pyarrow.parquet.read_table(path)
    values = table["features"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    features = torch.from_numpy(values.reshape(len(table), -1).copy())
    labels = torch.from_numpy(table["label"].to_numpy())
    data = torch.utils.data.TensorDataset(features, labels)
    loader: Any = torch.utils.data.DataLoader(data, batch_size=batch, shuffle=True, num_workers=workers)
    return sum(len(each) for each, _ in loader)


def measured(read: Callable[[str, int], int], path: str, batch: int) -> float:
    """Returns rows a second."""
    start = time.monotonic()
    return read(path, batch) / (time.monotonic() - start)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--rows", 400_000), ("--columns", 32), ("--batch", 256), ("--rounds", 5)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "rows.parquet")
        write_file(path, options.rows, options.columns)
        rates: dict[str, list[float]] = {"ronde": [], "PyTorch's DataLoader": []}
        for _ in range(options.rounds):
            rates["ronde"].append(measured(by_ronde, path, options.batch))
            rates["PyTorch's DataLoader"].append(measured(by_pytorch, path, options.batch))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    for name, rate in medians.items():
        print(f"{name}: {rate:,.0f} rows/s")
    first, second = medians.values()
    print(f"ratio {first / second:.1f}")


if __name__ == "__main__":
    main()
