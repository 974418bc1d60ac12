"""Summary statistics of samples."""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Summary:
    """Minimum, maximum, quartiles and median of samples, in the samples' unit."""

    samples: int
    least: float
    lower_quartile: float
    median: float
    upper_quartile: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Summarizes at least one value. Quartiles are interpolated between the nearest values."""
        if not values:
            raise ValueError("there are no samples")
        if len(values) == 1:
            return cls(1, *[float(values[0])] * 5)
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(len(values), float(min(values)), lower, median, upper, float(max(values)))


def slowest(per_rank: Sequence[Sequence[int]]) -> list[int]:
    """Returns the longest time of any rank for each iteration: the last rank's result completes the collective."""
    if len({len(times) for times in per_rank}) != 1:
        raise ValueError("ranks report different numbers of iterations")
    return [max(times) for times in zip(*per_rank)]
