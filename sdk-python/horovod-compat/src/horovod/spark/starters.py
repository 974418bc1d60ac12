"""The error of Horovod's functions that start processes over its own services on Spark."""

from __future__ import annotations


def no_starter(name: str) -> RuntimeError:
    """Returns the error for calling one of them, by its name."""
    return RuntimeError(
        f"{name} starts processes by services that Horovod runs in Spark's tasks, and horovod-compat has none: the "
        "tasks start the ranks themselves. Call horovod.spark.run, which takes the same function, or "
        "horovod.spark.run_elastic"
    )
