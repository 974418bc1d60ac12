"""A sampler that continues after a failure: that of `ronde.torch.elastic.sampler`."""

from __future__ import annotations

from ronde.torch import rank, size
from ronde.torch.elastic import sampler

__all__ = ["ElasticSampler", "rank", "size"]


class ElasticSampler(sampler.ElasticSampler):
    """`ronde.torch.elastic.ElasticSampler` with the `rank` and `size` of this module, which Horovod's users replace."""

    def _rank_and_size(self) -> tuple[int, int]:
        return rank(), size()
