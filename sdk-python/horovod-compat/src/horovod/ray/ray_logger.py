"""Values that rank 0 reports to the callbacks of `RayExecutor.run` and `execute`."""

from ronde.ray.worker import configure, log

__all__ = ["configure", "log"]
