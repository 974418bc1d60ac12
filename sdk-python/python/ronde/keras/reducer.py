"""What the reductions of gradients of Keras 3 on PyTorch and on JAX have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ronde.frameworks import process_sets
from ronde.frameworks.process_sets import ProcessSet, global_process_set
from ronde.ops import Average, Sum

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Options:
    """How gradients are reduced. Raises ValueError for options that exclude each other.

    op, compression, predivide, process_set -- as for `ronde.torch.DistributedOptimizer`
    passes, average -- how many passes are added before a reduction, and whether their sum is divided by that number
    scale_local     -- whether gradients of local variables are divided by the number of the set's ranks
    sparse_as_dense -- whether sparse gradients are converted to dense ones
    """

    op: int = Average
    compression: Any = None
    predivide: float = 1.0
    process_set: ProcessSet = global_process_set
    passes: int = 1
    average: bool = False
    scale_local: bool = True
    sparse_as_dense: bool = False

    def __post_init__(self) -> None:
        if self.op not in (Average, Sum):
            raise ValueError("Keras' DistributedOptimizer only supports Average and Sum as op")
        if self.predivide != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if not isinstance(self.passes, int) or self.passes <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0, as an integer; not {self.passes!r}")


class GradientReducer:
    """Reduces gradients. A rank outside of the process set applies its own ones."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._local: list[Any] = []

    def register_local(self, variable: Any) -> None:
        """Leaves a variable's gradient unreduced."""
        self._local.append(variable)

    def reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the gradients after their reduction. None stays None."""
        results = list(gradients)
        if not process_sets.reduces(self.options.process_set):
            return results
        size = process_sets.size_of(self.options.process_set)
        chosen = []
        for index, (gradient, variable) in enumerate(zip(gradients, variables)):
            if gradient is None:
                continue
            if any(variable is each for each in self._local):
                results[index] = gradient / size if self.options.scale_local else gradient
            else:
                chosen.append(index)
        compression = self.options.compression
        pairs = [compression.compress(results[index]) for index in chosen]
        reduced = self.reduce(chosen, [each for each, _ in pairs])
        for index, each, (_, context) in zip(chosen, reduced, pairs):
            results[index] = compression.decompress(each, context)
        return results

    def reduce(self, indices: Sequence[int], gradients: Sequence[Any]) -> Sequence[Any]:
        """Returns the reductions of gradients of the variables with these indices."""
        raise NotImplementedError
