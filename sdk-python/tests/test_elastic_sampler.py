"""Samplers of elastic jobs, over any sequence of sizes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")
hypothesis = pytest.importorskip("hypothesis")

from hypothesis import strategies as st  # noqa: E402

from ronde.torch import mpi_ops  # noqa: E402
from ronde.torch.elastic import ElasticSampler  # noqa: E402


class World:
    """The samplers of a job's ranks, which are asked one after the other."""

    def __init__(self, length: int, monkeypatch: Any) -> None:
        self.length, self._patch = length, monkeypatch
        self.samplers: list[ElasticSampler] = []

    def resize(self, size: int, seed: int) -> None:
        """As after a new membership: rank 0 stays, and all get its progress."""
        progress = self.samplers[0].state_dict() if self.samplers else None
        self.samplers = []
        for rank in range(size):
            self._patch.setattr(mpi_ops, "rank", lambda rank=rank: rank)
            self._patch.setattr(mpi_ops, "size", lambda: size)
            sampler = ElasticSampler(range(self.length), seed=seed)
            if progress is not None:
                sampler.load_state_dict(progress)
            self.samplers.append(sampler)

    def train(self, steps: int, batch: int) -> list[list[int]]:
        """Makes steps of all ranks. Returns the indices that each step uses."""
        used = []
        parts = [sampler.indices for sampler in self.samplers]
        for step, start in enumerate(range(0, len(parts[0]), batch)[:steps]):
            batches = [part[start : start + batch] for part in parts]
            used.append([index for each in batches for index in each])
            for sampler, each in zip(self.samplers, batches):
                sampler.record_batch(step, len(each))
        return used


PHASES = st.lists(st.tuples(st.integers(1, 7), st.integers(0, 4), st.integers(1, 5)), max_size=8)


@hypothesis.given(length=st.integers(0, 60), phases=PHASES, last=st.integers(1, 7), seed=st.integers(0, 3))
@hypothesis.settings(deadline=None, max_examples=200)
def test_each_index_is_used_once_over_any_sequence_of_sizes(
    length: int, phases: list[tuple[int, int, int]], last: int, seed: int
) -> None:
    """At the end of the epoch some are used twice, so that all ranks make the same number of steps."""
    with pytest.MonkeyPatch.context() as patch:
        world, used, sizes = World(length, patch), [], []
        for size, steps, batch in [*phases, (last, length + 1, 3)]:
            world.resize(size, seed)
            used += world.train(steps, batch)
            sizes.append(size)
        counts = Counter(index for step in used for index in step)
        assert set(counts) == set(range(length))
        assert sum(count - 1 for count in counts.values()) < max(sizes)
        before_the_last = [index for step in used[:-1] for index in step]
        assert len(set(before_the_last)) == len(before_the_last)
