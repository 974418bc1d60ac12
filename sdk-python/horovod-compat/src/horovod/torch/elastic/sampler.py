"""A sampler that goes on where it was: `ronde.torch.elastic.sampler`."""

from ronde.torch import rank, size
from ronde.torch.elastic.sampler import ElasticSampler

__all__ = ["ElasticSampler", "rank", "size"]
