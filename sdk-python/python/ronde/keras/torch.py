"""The reduction of gradients of Keras 3 on PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ronde.torch as hvd
from ronde.frameworks import world
from ronde.keras.reducer import GradientReducer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass
class State:
    """The sums of an optimizer's gradients, how many passes they have, and the client of their session."""

    sums: list[Any] = field(default_factory=list)
    passes: int = 0
    client: Any = None


class TorchReducer(GradientReducer):
    """Reduces gradients of PyTorch."""

    def begin(self) -> State:
        """Returns the state of an optimizer."""
        return State()

    def run(
        self,
        state: State,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        apply: Callable[[list[Any]], Any],
        skip: Callable[[], Any],
    ) -> Any:
        """Reduces gradients and applies them, or skips this pass. Raises ValueError for sparse ones not converted."""
        gradients = [self._dense(each) for each in gradients]
        passes = self.options.passes
        if passes == 1:
            return apply(self.reduced(gradients, variables))
        client = world.current().client
        if state.client is not client:
            # Sums of an earlier session: a restart has restored the model, and new workers have none.
            state.sums, state.passes, state.client = [], 0, client
        if not state.sums:
            state.sums = [None] * len(gradients)
        for index, each in enumerate(gradients):
            if each is not None:
                known = state.sums[index]
                state.sums[index] = each.detach().clone() if known is None else known + each
        state.passes += 1
        if state.passes < passes:
            return skip()
        sums, state.sums, state.passes = state.sums, [], 0
        if self.options.average:
            sums = [each if each is None else each / passes for each in sums]
        return apply(self.reduced(sums, variables))

    def _dense(self, gradient: Any) -> Any:
        if gradient is None:
            return None
        if not gradient.is_sparse:
            return gradient.detach().contiguous()
        if not self.options.sparse_as_dense:
            raise ValueError("Keras on PyTorch reduces dense gradients only; give sparse_as_dense=True")
        return gradient.detach().to_dense()

    def reduce(self, indices: Sequence[int], gradients: Sequence[Any]) -> Sequence[Any]:
        """Returns the reductions of gradients, all of which are in flight at once."""
        options = self.options
        handles = [
            hvd.allreduce_async(
                gradient,
                name=f"DistributedOptimizer.{index}",
                op=options.op,
                prescale_factor=1.0 / options.predivide,
                postscale_factor=options.predivide,
                process_set=options.process_set,
            )
            for index, gradient in zip(indices, gradients)
        ]
        return [hvd.synchronize(handle) for handle in handles]
