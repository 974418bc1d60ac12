"""`horovod.runner.common.service.compute_service`: the registry of compute jobs, and its client, without pickles."""

from ronde.data.compute_registry import ComputeClient, ComputeService, TimeoutException

__all__ = ["ComputeClient", "ComputeService", "TimeoutException"]
