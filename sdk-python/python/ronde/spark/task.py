"""What a function on a rank can ask about the task of Spark that started it."""

from __future__ import annotations

import os

from ronde.elastic.membership import is_elastic
from ronde.spark.supervisor import GPUS

_TRUE = ("1", "true")
# Horovod's variable, for clusters whose executors list GPUs of the host that they do not have.
_BY_LOCAL_RANK = "HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX"


def get_available_devices() -> list[str]:
    """Returns the addresses of the GPUs that Spark has given to this task, such as ["0"]; none without GPUs.

        torch.cuda.set_device(int(get_available_devices()[0]))

    It needs `spark.task.resource.gpu.amount`. With HOROVOD_SPARK_USE_LOCAL_RANK_GPU_INDEX=1 it is the local rank.
    Raises RuntimeError in a process that neither `ronde.spark` nor a task of Spark runs, and ValueError for that
    variable in a job of `run_elastic`.
    """
    if os.environ.get(_BY_LOCAL_RANK, "").lower() in _TRUE and "RONDE_LOCAL_RANK" in os.environ:
        # There each task is a host of its own, so that all ranks of a real host would share GPU 0.
        if is_elastic() and GPUS in os.environ:
            raise ValueError(
                f"{_BY_LOCAL_RANK} is set, but in a job of run_elastic the local rank is 0 on every rank, because each "
                "task of Spark is a host with one rank. Remove the variable: get_available_devices() then returns the "
                "GPUs that Spark has assigned to the task"
            )
        return [os.environ["RONDE_LOCAL_RANK"]]
    if GPUS in os.environ:
        return [address for address in os.environ[GPUS].split(",") if address]
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        raise RuntimeError(
            "get_available_devices() is for functions that ronde.spark.run or a task of Spark calls; this process is "
            "neither"
        )
    gpu = context.resources().get("gpu")
    return [] if gpu is None else list(gpu.addresses)
