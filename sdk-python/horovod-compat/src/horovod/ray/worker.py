"""The actor that runs a rank."""

from ronde.ray.worker import BaseHorovodWorker

__all__ = ["BaseHorovodWorker"]
