"""A sampler that continues after a failure: `ronde.torch.elastic.sampler`."""

from ronde.torch import rank, size
from ronde.torch.elastic.sampler import ElasticSampler

__all__ = ["ElasticSampler", "rank", "size"]
