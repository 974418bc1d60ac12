"""Workers of tf.data's service in tasks of Spark: `spark-submit compute_worker.py FILE`, or this module by `python -m`.

The session's default parallelism is the number of workers. Rank 0 writes FILE on its own host, so its path is one that
training jobs see, too.
"""

from __future__ import annotations

import os

from pyspark.sql import SparkSession

import horovod.spark
from horovod.tensorflow.data import compute_worker
from ronde.tensorflow.data.compute_worker import command_line

__all__ = ["main"]


def main(
    dispatchers: int,
    dispatcher_side: str,
    configfile: str | os.PathLike[str],
    timeout: float = 60,
    plaintext_network: bool = False,
) -> None:
    """Runs the workers until a training job calls `shutdown` of the compute client.

    The arguments are those of `horovod.tensorflow.data.compute_worker.main`. Raises what that and `horovod.spark.run`
    do.
    """
    SparkSession.builder.getOrCreate()
    path = os.path.abspath(configfile)
    horovod.spark.run(compute_worker.main, args=(dispatchers, dispatcher_side, path, timeout, plaintext_network))


if __name__ == "__main__":
    main(**command_line())
