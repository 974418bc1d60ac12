"""What the examples for Spark share: a session, scikit-learn's handwritten digits as DataFrames, and a report."""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import numpy
from pyspark.ml.functions import vector_to_array
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from ronde.spark.common.store import Store


def arguments(description: str | None) -> Any:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-proc", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--store", help="a folder or URL that all hosts reach; default: a temporary folder")
    parser.add_argument("--master", help='Spark\'s master; default: that of spark-submit, else "local[2]"')
    return parser.parse_args()


def prepared(options: Any) -> tuple[Any, Any, Any, Store]:
    """Returns the session, DataFrames for training and test with the columns `pixels` and `digit`, and the store."""
    builder = SparkSession.builder.appName("digits")
    spark = (
        builder.master(options.master) if options.master else builder.config("spark.master", "local[2]")
    ).getOrCreate()
    images, digits = load_digits(return_X_y=True)
    rows = [((image / 16).tolist(), int(digit)) for image, digit in zip(images, digits)]
    train, test = spark.createDataFrame(rows, ["pixels", "digit"]).randomSplit([0.8, 0.2], seed=1)
    return spark, train, test, Store.create(options.store or tempfile.mkdtemp(prefix="digits-"))


def report(predictions: Any) -> None:
    """Prints the share of rows whose highest score is that of the digit."""
    rows = predictions.select("digit", vector_to_array("scores").alias("scores")).collect()
    right = numpy.mean([int(numpy.argmax(row["scores"])) == row["digit"] for row in rows])
    print(f"test accuracy {right:.4f} of {len(rows)} images", flush=True)
