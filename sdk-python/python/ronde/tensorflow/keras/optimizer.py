"""Optimizers of Keras on TensorFlow that reduce gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ronde.frameworks.keras import optimizer as keras_optimizer
from ronde.ops import Average, Sum
from ronde.tensorflow.aggregation import GradientAggregation, check_passes
from ronde.tensorflow.reduction import Options, reduce_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class TensorFlowReducer:
    """Reduces gradients of TensorFlow.

    options -- how
    passes, average -- how many passes are added before a reduction, and whether their sum is divided by that number
    """

    def __init__(self, options: Options, passes: int = 1, average: bool = False) -> None:
        check_passes(passes)
        if options.op not in (Average, Sum):
            raise ValueError("Keras' DistributedOptimizer only supports Average and Sum as op")
        self.options, self.passes, self.average = options, passes, average

    def begin(self) -> GradientAggregation:
        """Returns the sums of an optimizer's gradients."""
        return GradientAggregation(self.passes, self.average, self.options.sparse_as_dense)

    def run(
        self,
        state: GradientAggregation,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        apply: Callable[[list[Any]], Any],
        skip: Callable[[], Any],
    ) -> Any:
        """Reduces gradients and applies them, or skips this pass."""
        return state.run(
            gradients, variables, lambda sums: reduce_gradients(sums, variables, self.options), apply, skip
        )

    def register_local(self, variable: Any) -> None:
        """Leaves a variable's gradient unreduced."""
        self.options.register_local(variable)


def wrap(optimizer: Any, name: str | None, options: Options, passes: int, average: bool) -> Any:
    """Returns a copy of an optimizer of Keras that reduces gradients. Raises ValueError as `DistributedOptimizer`."""
    return keras_optimizer.wrap(optimizer, name, TensorFlowReducer(options, passes, average))
