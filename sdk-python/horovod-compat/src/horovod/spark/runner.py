"""Functions on all ranks of a job whose processes are tasks of Spark."""

from ronde.spark import run, run_elastic

__all__ = ["run", "run_elastic"]
