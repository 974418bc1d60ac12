"""Jobs whose processes are actors of Ray, and Ray Train on ronde.

    executor = ronde.ray.RayExecutor(num_workers=4)
    executor.start()
    losses = executor.run(train)
    executor.shutdown()

Each node has one sidecar, which moves the tensors of its workers. Importing this module needs Ray.
"""

from ronde.frameworks.requirement import of_wheel

try:
    import ray
except ImportError as error:
    raise ImportError(
        f'ronde.ray needs Ray, which is not installed here: pip install "ray[train]" ({of_wheel("ray")})', name="ray"
    ) from error

from ronde.ray import version

version.check(ray.__version__)

from ronde.ray.discovery import RayHostDiscovery  # noqa: E402
from ronde.ray.elastic_executor import ElasticRayExecutor  # noqa: E402
from ronde.ray.executor import RayExecutor  # noqa: E402
from ronde.ray.failures import WorkerError  # noqa: E402
from ronde.ray.worker import BaseHorovodWorker, log  # noqa: E402

__all__ = ["BaseHorovodWorker", "ElasticRayExecutor", "RayExecutor", "RayHostDiscovery", "WorkerError", "log"]
