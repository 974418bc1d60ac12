"""A sampler that goes on, after a failure, with what of the epoch is left."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import torch.utils.data

from ronde.torch import mpi_ops

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides the indices of a dataset among the ranks, and knows how many of this epoch have been used.

    All ranks have the same number of indices: where they do not come out even, the first ones are used twice.

    dataset -- what has a length
    shuffle -- whether each epoch has an order of its own, the same on all ranks
    seed    -- of that order, the same on all ranks

    Attributes, beside these, as the last `reset` has left them:

    epoch, processed_num              -- the epoch, and how many of its indices all ranks together have used
    processed_indices                 -- which those are, in the order of the epoch
    remaining_indices                 -- the others, of all ranks, in the order of the epoch
    rank, num_replicas (also `size`)  -- this rank, and how many there are
    num_samples, total_size           -- how many indices each rank gets of them, and all together
    indices                           -- the indices of this rank, in the order in which iteration yields them
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 0
        self.rank = 0
        self.processed_indices: list[int] = []
        self.remaining_indices: list[int] = []
        self.num_samples = 0
        self.total_size = 0
        self.reset()

    @property
    def size(self) -> int:
        """How many ranks there are: `num_replicas`."""
        return self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch, of which nothing has been used. Call it at the end of the one before."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Notes that every rank has used a batch of this size, whatever its number."""
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and how many of its indices have been used."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on where another sampler was."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divides what is left of the epoch among the ranks that there are now."""
        self.num_replicas = mpi_ops.size()
        self.rank = mpi_ops.rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.processed_indices = indices[: self.processed_num]
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    @property
    def indices(self) -> list[int]:
        """The indices of this rank that are left of the epoch; `num_samples` of them."""
        repeated = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return list(repeated)[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
