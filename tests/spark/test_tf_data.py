"""Workers of tf.data's service in tasks of Spark, by Horovod's program."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys

from test_run import wait_until

END_S = 200


def test_tasks_of_spark_compute_what_training_reads(home: pathlib.Path, tmp_path: pathlib.Path) -> None:
    config, log = tmp_path / "compute.json", tmp_path / "log"
    options = ["--master", "local[2]", "--conf", "spark.ui.enabled=false", "pyspark-shell"]
    variables = {**os.environ, "PYSPARK_SUBMIT_ARGS": " ".join(options), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "horovod.spark.tensorflow.compute_worker", str(config)]
    with log.open("wb") as output:
        started = subprocess.Popen(command, env=variables, stdout=output, stderr=output)
    try:
        wait_until(lambda: config.exists() or started.poll() is not None)
        assert started.poll() is None, log.read_text()
        assert squares(config) == [number * number for number in range(40)]
        # Training has shut it down.
        assert started.wait(END_S) == 0, log.read_text()
    finally:
        started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(60)
        started.kill()


def squares(config: pathlib.Path) -> list[int]:
    """What a training process of one rank reads, sorted; ends the service."""
    import tensorflow as tf
    from horovod.tensorflow.data.compute_service import TfDataServiceConfig

    found = TfDataServiceConfig.read(config)
    dataset = tf.data.Dataset.range(40).map(lambda number: number * number)
    read = sorted(int(each) for each in dataset.send_to_data_service(found, 0, 1, reuse_dataset=True))
    found.compute_client().shutdown()
    return read
