"""The common base of distributed optimizers: hooks on gradients, and the mixin over the wrapped optimizer's class."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Callable

import torch

from ronde.frameworks.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping

    from ronde.plugins import PluginOp


def trainable(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns the parameters that require gradients, each once, in group order, which is the same on all ranks."""
    parameters = dict.fromkeys(parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter for parameter in parameters if parameter.requires_grad]


def made_gradient(parameter: torch.Tensor, is_sparse: bool) -> torch.Tensor:
    """Returns a placeholder gradient of zeros that counts as none, for programs that expect Horovod's zeros."""
    zeros = torch.zeros_like(parameter)
    gradient = zeros.to_sparse(1) if is_sparse else zeros
    setattr(gradient, _IS_MADE, True)
    return gradient


def forget_made_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Resets unchanged placeholders of `made_gradient` to None, so that the optimizer does not step the parameter."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and getattr(gradient, _IS_MADE, False):
            setattr(gradient, _IS_MADE, False)
            is_empty = gradient._nnz() == 0 if gradient.is_sparse else not gradient.any()
            if is_empty:
                parameter.grad = None


_IS_MADE = "_ronde_is_made"


class Watcher:
    """Hooks that run as soon as a backward pass has accumulated a gradient.

    names           -- the names of parameters, which are the same on all ranks
    passes          -- backward passes before a step
    op, process_set -- the reduction of gradients, or of changes of parameters, and its ranks
    predivide       -- with Average, the divisor of gradients before the sum
    delay           -- for each parameter, the backward passes that remain before its gradient is submitted
    watched         -- the parameters whose gradients are submitted even if no backward pass computes them
    """

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        passes: int,
        op: int | PluginOp,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self.names = names
        self.passes = passes
        self.op = op
        self.process_set = process_set
        self.predivide = 1.0
        self.delay = dict.fromkeys(names, passes)
        self.watched: set[torch.Tensor] = set()
        self._finalizers: list[Callable[[], Any]] = []

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Installs hooks on an optimizer's parameters. They end with this object: another optimizer may follow."""
        hook = weakref.WeakMethod(self._accumulated)

        def accumulated(parameter: torch.Tensor) -> None:
            if (method := hook()) is not None:
                method(parameter)

        for parameter in trainable(optimizer):
            self.watched.add(parameter)
            handle = parameter.register_post_accumulate_grad_hook(accumulated)
            self._finalizers.append(weakref.finalize(self, handle.remove))

    def leave(self) -> None:
        """Removes the hooks, because the model gets another optimizer."""
        for remove in self._finalizers:
            remove()

    def reset(self) -> None:
        """Resets the counts, as after a step."""
        raise NotImplementedError

    def handles(self) -> MutableMapping[torch.Tensor, tuple[int, Any]]:
        """The reductions in flight."""
        raise NotImplementedError

    def set_passes(self, passes: int) -> None:
        """Changes how many backward passes are summed, including for gradients that are not submitted yet."""
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self.passes = passes
        in_flight = self.handles()
        for parameter in self.delay:
            if parameter not in in_flight:
                self.delay[parameter] = passes

    def _start_delays(self) -> None:
        for parameter in self.delay:
            self.delay[parameter] = self.passes

    def _count_down(self, parameter: torch.Tensor) -> int:
        """Counts one backward pass. Returns how many remain, which is negative after one too many."""
        left = self.delay.get(parameter, self.passes) - 1
        self.delay[parameter] = left
        return left

    def _accumulated(self, parameter: torch.Tensor) -> None:
        raise NotImplementedError

    def _name(self, parameter: torch.Tensor) -> str:
        # A parameter that was added later has no name; use its index among all parameters.
        return self.names.setdefault(parameter, f"noname.later.{len(self.names)}")


def too_many_passes(also: str = "") -> AssertionError:
    """Returns the error for more backward passes than a step accumulates."""
    return AssertionError(
        f"Gradients were computed more than backward_passes_per_step times before a call to step(){also}; increase "
        "backward_passes_per_step to accumulate gradients locally."
    )


class Wrapping(torch.optim.Optimizer):
    """The common mixin of distributed optimizers' classes.

    The attributes are those of Horovod's wrapper, with the same meaning; programs for Horovod read and change them.
    """

    _ronde: Any  # its Watcher
    _wrapped: Any  # the optimizer that was given

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads the wrapped optimizer's state; reductions in flight are dropped."""
        self._ronde.reset()
        super().load_state_dict(state_dict)

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes are summed before a reduction. Setting it calls `set_backward_passes_per_step`."""
        passes: int = self._ronde.passes
        return passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self._ronde.set_passes(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes are summed before a reduction, from the next pass on.

        Passes since the last step no longer count; a gradient that is already in flight is reduced without further
        passes. Raises ValueError below 1.
        """
        self._ronde.set_passes(passes)

    @property
    def op(self) -> int | PluginOp:
        """The reduction."""
        op: int | PluginOp = self._ronde.op
        return op

    @op.setter
    def op(self, op: int | PluginOp) -> None:
        self._ronde.op = op

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that reduce."""
        process_set: ProcessSet = self._ronde.process_set
        return process_set

    @property
    def gradient_predivide_factor(self) -> float:
        """The divisor of gradients before their sum, with op=Average."""
        factor: float = self._ronde.predivide
        return factor

    @gradient_predivide_factor.setter
    def gradient_predivide_factor(self, factor: float) -> None:
        self._ronde.predivide = factor

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        names: dict[torch.Tensor, str] = self._ronde.names
        return names

    @property
    def _requires_update(self) -> set[torch.Tensor]:
        watched: set[torch.Tensor] = self._ronde.watched
        return watched

    @property
    def _allreduce_delay(self) -> dict[torch.Tensor, int]:
        delay: dict[torch.Tensor, int] = self._ronde.delay
        return delay

    @property
    def _handles(self) -> MutableMapping[torch.Tensor, tuple[int, Any]]:
        handles: MutableMapping[torch.Tensor, tuple[int, Any]] = self._ronde.handles()
        return handles

    @_handles.setter
    def _handles(self, handles: Iterable[Any]) -> None:
        if list(handles):
            raise TypeError("handles of gradients in flight cannot be replaced; assign {} to drop all of them")
        self._handles.clear()
