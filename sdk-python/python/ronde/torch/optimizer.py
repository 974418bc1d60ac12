"""The distributed optimizer: gradients are reduced while the backward pass still computes others."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any, Callable

import torch

from ronde.handle import Handle
from ronde.ops import Adasum, Average, Sum
from ronde.torch import mpi_ops
from ronde.torch.compression import Compression, Compressor
from ronde.torch.window import Window

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator


def DistributedOptimizer(  # noqa: N802 -- the name that users know
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    sparse_as_dense: bool = False,
) -> Any:
    """An optimizer of the same class that reduces gradients over all ranks before each step.

    named_parameters          -- names by which the ranks agree, usually `model.named_parameters()`
    compression               -- what is done to a gradient before it is handed over
    backward_passes_per_step  -- backward passes whose gradients are summed here before they are reduced
    op                        -- Average or another reduction, but not Adasum
    gradient_predivide_factor -- with Average: divides by this before and by the rest after the sum
    sparse_as_dense           -- makes sparse gradients dense; without it they raise

    The optimizer given is not to be used any more: the result takes over its parameters and state.

    From 64 KiB on the memory of a gradient is replaced by the result's when it is reduced, not written (`p.grad` stays
    the same tensor); not so for gradients that are compressed, on another device, parts of a larger tensor or not laid
    out in rows, and not with `init(mapped=False)` or RONDE_MAPPED=0. Bits are the same either way.

    Gradients are of the floating-point types of `ronde.Client.allreduce` and have the same shapes on all ranks; `step`
    and `synchronize` raise what that does. Raises NotImplementedError for Adasum, and ValueError for
    `backward_passes_per_step` below 1, a factor without Average, and names that are missing or not unique.
    """
    if op == Adasum:
        raise NotImplementedError("DistributedOptimizer does not support op=Adasum yet")
    if op != Average and gradient_predivide_factor != 1.0:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if backward_passes_per_step <= 0:
        raise ValueError("backward_passes_per_step must be > 0")
    names = _names(optimizer, named_parameters)
    kind = type(optimizer)
    distributed: Any = type(kind.__name__, (_Distributed, kind), {"__module__": kind.__module__})
    result = distributed.__new__(distributed)
    # The same groups, state and defaults: a scheduler made for the optimizer before keeps its effect.
    result.__dict__.update(optimizer.__dict__)
    result._ronde = _Reducer(names, compression, backward_passes_per_step, op, gradient_predivide_factor)
    result._ronde.sparse_as_dense = sparse_as_dense
    result._ronde.watch(result)
    return result


class _Distributed(torch.optim.Optimizer):
    """What is laid over the wrapped optimizer's class."""

    _ronde: _Reducer

    def synchronize(self) -> None:
        """Waits until all gradients are reduced. Then clip them, and step within `skip_synchronize`."""
        self._ronde.synchronize(self)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step` does not reduce: `synchronize` was called before."""
        self._ronde.steps_synchronize = False
        try:
            yield
        finally:
            self._ronde.steps_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduces the gradients and makes a step of the wrapped optimizer."""
        self._ronde.before_step(self)
        return super().step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients; not while they are being reduced."""
        self._ronde.check_idle()
        super().zero_grad(set_to_none=set_to_none)

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads the wrapped optimizer's state; reductions in flight are dropped."""
        self._ronde.reset()
        super().load_state_dict(state_dict)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes are summed before a reduction."""
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self._ronde.passes = passes
        self._ronde.reset()


class _Reducer:
    """The reductions of one optimizer's gradients: which are in flight, and how often each parameter was passed."""

    def __init__(
        self, names: dict[torch.Tensor, str], compression: type[Compressor], passes: int, op: int, predivide: float
    ) -> None:
        self.names = names
        self.compression = compression
        self.passes = passes
        self.op, self.prescale, self.postscale = op, 1.0, 1.0
        self.sparse_as_dense = False
        self.steps_synchronize = True
        if predivide != 1.0:
            self.op, self.prescale, self.postscale = Sum, 1.0 / predivide, predivide / mpi_ops.size()
        self._left: dict[torch.Tensor, int] = {}
        self._in_flight: dict[torch.Tensor, _Reduction] = {}
        self._synchronized = False

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Submits each gradient as soon as the backward pass has accumulated it."""
        if mpi_ops.size() == 1:
            return
        for parameter in _trainable(optimizer):
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def synchronize(self, optimizer: torch.optim.Optimizer) -> None:
        """Submits what no hook has submitted, then waits for everything."""
        if mpi_ops.size() == 1:
            self._synchronized = True
            return
        try:
            window = Window()
            # In the order of the groups, which is the same on all ranks.
            for parameter in _trainable(optimizer):
                if parameter not in self._in_flight:
                    gradient = parameter.grad
                    if gradient is None:
                        gradient = parameter.grad = torch.zeros_like(parameter)
                    nbytes = gradient.numel() * gradient.element_size()
                    window.submit(nbytes, partial(self._submit, parameter))
            window.finish()
            for reduction in list(self._in_flight.values()):
                reduction.wait()
            self._synchronized = True
        finally:
            self.drop_in_flight()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduces what has to be reduced before a step."""
        if self.steps_synchronize:
            if self._synchronized:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after optimizer.synchronize(): "
                    "gradients are reduced a second time",
                    stacklevel=3,
                )
            self.synchronize(optimizer)
        self._synchronized = False

    def check_idle(self) -> None:
        """Raises while gradients are in flight."""
        if self._in_flight:
            raise AssertionError(
                "optimizer.zero_grad() was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): this would lose gradients that are being reduced"
            )

    def reset(self) -> None:
        """Begins anew, as after a step."""
        self.drop_in_flight()
        self._synchronized = False

    def drop_in_flight(self) -> None:
        """Forgets reductions; what is not complete is withdrawn."""
        self._in_flight.clear()
        self._left.clear()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if parameter in self._in_flight:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before a call to step(); increase "
                "backward_passes_per_step to accumulate gradients locally."
            )
        left = self._left.get(parameter, self.passes) - 1
        self._left[parameter] = left
        if left == 0:
            self._submit(parameter)

    def _submit(self, parameter: torch.Tensor) -> _Reduction:
        gradient = parameter.grad
        assert gradient is not None  # the hook runs behind its accumulation; others are made by `synchronize`
        if gradient.is_sparse:
            if not self.sparse_as_dense:
                raise ValueError(f"the gradient of {self._name(parameter)} is sparse; use sparse_as_dense=True")
            gradient = parameter.grad = gradient.to_dense()
        compressed, context = self.compression.compress(gradient)
        client, name = mpi_ops.client(), self._name(parameter)
        if compressed is gradient:
            handle = client.reduce_gradient(gradient, self.op, name, self.prescale, self.postscale)
        else:
            handle = client.allreduce_async(compressed, self.op, name, self.prescale, self.postscale, out=compressed)
        reduction = _Reduction(handle, parameter, gradient, self.compression, context)
        self._in_flight[parameter] = reduction
        return reduction

    def _name(self, parameter: torch.Tensor) -> str:
        # A parameter that was added later has no name; its place among all others is its name.
        return self.names.setdefault(parameter, f"noname.later.{len(self.names)}")


class _Reduction:
    """One gradient on its way."""

    def __init__(
        self,
        handle: Handle,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        compression: type[Compressor],
        context: Any,
    ) -> None:
        self._handle = handle
        self._parameter = parameter
        self._gradient = gradient
        self._compression = compression
        self._context = context
        self._done = False

    def wait(self) -> None:
        """Waits and writes the result where the optimizer looks. May be called again."""
        if self._done:
            return
        result = self._compression.decompress(self._handle.wait(), self._context)
        if result is not self._gradient:
            with torch.no_grad():
                self._gradient.copy_(result)
        # The user may have replaced it meanwhile.
        if self._parameter.grad is not self._gradient:
            self._parameter.grad = self._gradient
        self._done = True


def _trainable(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]


def _names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> dict[torch.Tensor, str]:
    if named_parameters is None:
        return {
            parameter: f"noname.{number}.{index}"
            for number, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }
    named = list(named_parameters)
    if not all(isinstance(item, tuple) for item in named):
        raise ValueError(
            "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
            "model.named_parameters()."
        )
    duplicates = sorted(name for name, count in Counter(name for name, _ in named).items() if count > 1)
    if duplicates:
        raise ValueError(
            f"Parameter names in named_parameters must be unique. Found duplicates: {', '.join(duplicates)}"
        )
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in named}
    unnamed = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"] if p not in names]
    if unnamed:
        raise ValueError(
            f"named_parameters was specified, but one or more model parameters were not named; their shapes: {unnamed}"
        )
    return names
