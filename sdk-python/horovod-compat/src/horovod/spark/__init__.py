"""`horovod.spark`: Horovod's names for `ronde.spark`. Importing it needs PySpark."""

from horovod.spark import conf
from horovod.spark.runner import run, run_elastic

__all__ = ["conf", "run", "run_elastic"]
