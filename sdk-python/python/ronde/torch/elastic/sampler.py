"""A sampler that continues after a failure with the rest of the epoch."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import torch.utils.data

from ronde.torch import mpi_ops

if TYPE_CHECKING:
    from collections.abc import Iterator, Sized


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides the indices of a dataset among the ranks, and counts how many of this epoch have been used.

    All ranks get the same number of indices: if they do not divide evenly, the first ones are used twice.

    dataset -- a dataset with a length
    shuffle -- whether to shuffle each epoch, in the same order on all ranks
    seed    -- the seed of that order, the same on all ranks

    Further attributes, as of the last `reset`:

    epoch, processed_num              -- the epoch, and how many of its indices all ranks together have used
    processed_indices                 -- these indices, in the order of the epoch
    remaining_indices                 -- the others, of all ranks, in the order of the epoch
    rank, num_replicas (also `size`)  -- this rank, and the number of ranks
    num_samples, total_size           -- the number of indices for each rank, and for all ranks together
    indices                           -- the indices of this rank, in the order of iteration
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
        """The number of ranks, as `num_replicas`."""
        return self.num_replicas

    def set_epoch(self, epoch: int) -> None:
        """Begins an epoch with all indices unused. Call it at the end of the previous epoch."""
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Records that every rank has used a batch of this size. The index of the batch is ignored."""
        del batch_idx
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Returns the epoch, and how many of its indices have been used."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the epoch and the progress of another sampler."""
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divides the rest of the epoch among the current ranks."""
        self.rank, self.num_replicas = self._rank_and_size()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.processed_indices = indices[: self.processed_num]
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def _rank_and_size(self) -> tuple[int, int]:
        return mpi_ops.rank(), mpi_ops.size()

    @property
    def indices(self) -> list[int]:
        """This rank's `num_samples` indices of the rest of the epoch."""
        repeated = itertools.islice(itertools.cycle(self.remaining_indices), self.total_size)
        return list(repeated)[self.rank :: self.num_replicas]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return self.num_samples
