"""Jobs whose processes are tasks of Spark.

    losses = ronde.spark.run(train, args=(0.1,), num_proc=4)

Each host of executors has one sidecar, which moves the tensors of its ranks. Importing this module needs PySpark.
"""

from ronde.frameworks.requirement import of_wheel

try:
    import pyspark
except ImportError as error:
    raise ImportError(
        "ronde.spark needs PySpark in the release of the cluster, which is not installed here: pip install pyspark "
        f"pyarrow ({of_wheel('spark')})",
        name="pyspark",
    ) from error

from ronde.spark import version

version.check(pyspark.__version__)

from ronde.spark.elastic import run_elastic  # noqa: E402
from ronde.spark.failures import WorkerError  # noqa: E402
from ronde.spark.runner import run  # noqa: E402

__all__ = ["WorkerError", "run", "run_elastic"]
