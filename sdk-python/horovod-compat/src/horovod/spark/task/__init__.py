"""What a function on a rank can ask about the task of Spark that started it."""

from ronde.spark.task import get_available_devices

__all__ = ["get_available_devices"]
