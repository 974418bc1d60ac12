"""Elastic jobs on Ray."""

from ronde.ray.discovery import RayHostDiscovery
from ronde.ray.elastic_executor import ElasticRayExecutor

__all__ = ["ElasticRayExecutor", "RayHostDiscovery"]
