"""A driver on the first of two hosts: `hosts_program.py MASTER CASE [SETTINGS [CREDENTIALS]]`. Prints a line of JSON.

SETTINGS of Spark and CREDENTIALS for `ronde.spark.run` are JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ronde.spark
from pyspark.sql import SparkSession
from ronde.errors import RondeError

# As float32 in the tensors of all ranks; their sum is found in no argument.
MARK = 12345.678
# Ample, for machines that do much else.
START_S = 900


def reduce() -> dict[str, Any]:
    import os
    import socket

    import ronde.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.full((100_000,), float(os.environ["MARK"])), op=hvd.Sum)
    found = {"sum": float(total[0]), "same": bool((total == total[0]).all()), "host": socket.gethostname()}
    found["rank"], found["secrets"] = (
        hvd.rank(),
        [name for name in os.environ if "SECRET" in name or name.startswith("_SPARK_")],
    )
    hvd.shutdown()
    return found


def main() -> None:
    master, case, *rest = sys.argv[1:]
    settings, credentials = [json.loads(text) for text in rest] + [{}] * (2 - len(rest))
    builder = SparkSession.builder.master(master)
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        # Of a rank too few, Spark may start both on one host.
        if case == "elastic":
            options = {"num_proc": 2, "start_timeout": START_S}
            found: Any = ronde.spark.run_elastic(reduce, env={"MARK": str(MARK)}, **options)
        else:
            found = ronde.spark.run(reduce, num_proc=2, start_timeout=START_S, env={"MARK": str(MARK)}, **credentials)
    except RondeError as error:
        found = {"error": str(error), "cause": error.cause}
    print(json.dumps(found))
    spark.stop()


if __name__ == "__main__":
    main()
