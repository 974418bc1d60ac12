"""`horovod.ray`: Horovod's names for `ronde.ray`. Importing it needs Ray."""

from horovod.ray import ray_logger
from horovod.ray.runner import RayExecutor
from horovod.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "RayExecutor", "ray_logger"]
