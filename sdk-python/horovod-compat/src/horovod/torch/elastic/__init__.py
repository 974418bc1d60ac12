"""`horovod.torch.elastic`: `ronde.torch.elastic`."""

from ronde.torch.elastic import ElasticSampler, TorchState, run

__all__ = ["ElasticSampler", "TorchState", "run"]
