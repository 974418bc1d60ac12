"""`horovod.ray`: Horovod's names for `ronde.ray`. Importing it needs Ray."""

from horovod.ray import ray_logger
from horovod.ray.elastic import ElasticRayExecutor
from horovod.ray.runner import RayExecutor
from horovod.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor", "ray_logger"]
