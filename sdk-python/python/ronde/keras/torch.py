"""The reduction of gradients of Keras 3 on PyTorch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import ronde.torch as hvd
from ronde.frameworks import process_sets, world
from ronde.ops import Average, Sum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


@dataclass
class State:
    """The sums of an optimizer's gradients, how many passes they have, and the client of their session."""

    sums: list[Any] = field(default_factory=list)
    passes: int = 0
    client: Any = None


class TorchReducer:
    """Reduces gradients of PyTorch.

    op, compression, predivide, process_set -- as for `ronde.torch.DistributedOptimizer`
    passes, average -- how many passes are added before a reduction, and whether their sum is divided by that number
    scale_local     -- whether gradients of local variables are divided by the number of the set's ranks
    sparse_as_dense -- whether sparse gradients are converted to dense ones

    A rank outside of the process set applies its own gradients.
    """

    def __init__(
        self,
        op: int,
        compression: Any,
        predivide: float,
        process_set: Any,
        passes: int,
        average: bool,
        scale_local: bool,
        sparse_as_dense: bool = False,
    ) -> None:
        if op not in (Average, Sum):
            raise ValueError("Keras' DistributedOptimizer only supports Average and Sum as op")
        if predivide != 1.0 and op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if not isinstance(passes, int) or passes <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0, as an integer; not {passes!r}")
        self._op, self._compression, self._predivide, self._process_set = op, compression, predivide, process_set
        self._passes, self._average, self._scale_local = passes, average, scale_local
        self._sparse_as_dense = sparse_as_dense
        self._local: list[Any] = []

    def begin(self) -> State:
        """Returns the state of an optimizer."""
        return State()

    def register_local(self, variable: Any) -> None:
        """Leaves a variable's gradient unreduced."""
        self._local.append(variable)

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
        if self._passes == 1:
            return apply(self._reduced(gradients, variables))
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
        if state.passes < self._passes:
            return skip()
        sums, state.sums, state.passes = state.sums, [], 0
        if self._average:
            sums = [each if each is None else each / self._passes for each in sums]
        return apply(self._reduced(sums, variables))

    def _dense(self, gradient: Any) -> Any:
        if gradient is None or not gradient.is_sparse:
            return gradient
        if not self._sparse_as_dense:
            raise ValueError("Keras on PyTorch reduces dense gradients only; give sparse_as_dense=True")
        return gradient.to_dense()

    def _reduced(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        results = list(gradients)
        if not process_sets.reduces(self._process_set):
            return results
        size = process_sets.size_of(self._process_set)
        in_flight = []
        for index, (gradient, variable) in enumerate(zip(gradients, variables)):
            if gradient is None:
                continue
            if any(variable is each for each in self._local):
                results[index] = gradient / size if self._scale_local else gradient
                continue
            compressed, context = self._compression.compress(_contiguous(gradient))
            handle = hvd.allreduce_async(
                compressed,
                name=f"DistributedOptimizer.{index}",
                op=self._op,
                prescale_factor=1.0 / self._predivide,
                postscale_factor=self._predivide,
                process_set=self._process_set,
            )
            in_flight.append((index, handle, context))
        for index, handle, context in in_flight:
            results[index] = self._compression.decompress(hvd.synchronize(handle), context)
        return results


def _contiguous(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().contiguous()
