"""Finds gradients that no rank has, and gradients that are sparse on other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ronde.frameworks import basics, world
from ronde.frameworks.process_sets import ProcessSet, members_of
from ronde.ops import Sum

if TYPE_CHECKING:
    from ronde.frameworks.world import InFlight


class GradientVote:
    """A vote, in which all ranks report which gradients they have.

    Each vote costs a small all-reduce, so it runs only in steps 1, 2, 4, 8, ... and in each step after one in which a
    rank lacked a gradient. All ranks count steps alike, and restart from 0 when their step counts may differ.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._is_partial = False  # whether a rank lacked a gradient in the last vote
        self._generation: tuple[int, int] | None = None

    def begin(self, name: str, parameters: list[torch.Tensor], process_set: ProcessSet) -> InFlight | None:
        """Reports this rank's gradients to the ranks of a set. Returns None if this step has no vote."""
        generation = world.generation(process_set.process_set_id)
        if self._generation != generation:
            self._generation, self._steps, self._is_partial = generation, 0, False
        self._steps += 1
        is_due = self._is_partial or self._steps & (self._steps - 1) == 0
        if not is_due or not parameters:
            return None
        grads = [parameter.grad for parameter in parameters]
        here = [int(grad is not None) for grad in grads]
        sparse = [grad.sparse_dim() if grad is not None and grad.is_sparse else 0 for grad in grads]
        voters = [1] * len(parameters)  # their sum is the number of ranks that have voted, also if one was lost
        vote = torch.tensor([here, [int(bool(dimensions)) for dimensions in sparse], sparse, voters], dtype=torch.int32)
        members, name = members_of(process_set), f"gradients_present.{name}"
        with world.traced("allreduce", name):
            return basics.client().allreduce_async(vote, Sum, name, process_set=members)

    def result(
        self, vote_in_flight: InFlight, parameters: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], dict[torch.Tensor, int]]:
        """Returns the parameters whose gradient no rank has, and the sparse dimensions of those sparse on some rank."""
        counts, sparse, dimensions, voters = world.wait_for("allreduce", vote_in_flight).tolist()
        self._is_partial = any(count < ranks for count, ranks in zip(counts, voters))
        on_no_rank = [parameter for parameter, count in zip(parameters, counts) if count == 0]
        known = {each: total // ranks for each, ranks, total in zip(parameters, sparse, dimensions) if ranks}
        return on_no_rank, known
