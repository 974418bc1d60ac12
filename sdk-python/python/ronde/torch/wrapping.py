"""What all distributed optimizers have in common: hooks on gradients, and the class laid over the wrapped one's."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Callable

import torch

from ronde.torch.process_sets import ProcessSet, global_process_set

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping

    from ronde.plugins import PluginOp


def trainable(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that get gradients, each once, in the order of the groups, which is the same on all ranks."""
    parameters = dict.fromkeys(parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter for parameter in parameters if parameter.requires_grad]


def made_gradient(parameter: torch.Tensor, is_sparse: bool) -> torch.Tensor:
    """A gradient of zeros that stands for none, for programs that expect one, as Horovod leaves it."""
    zeros = torch.zeros_like(parameter)
    gradient = zeros.to_sparse(1) if is_sparse else zeros
    setattr(gradient, _IS_MADE, True)
    return gradient


def forget_made_gradients(parameters: Iterable[torch.Tensor]) -> None:
    """Puts None where `made_gradient` was put and nothing was added since: such a parameter is not to be stepped."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and getattr(gradient, _IS_MADE, False):
            setattr(gradient, _IS_MADE, False)
            is_empty = gradient._nnz() == 0 if gradient.is_sparse else not gradient.any()
            if is_empty:
                parameter.grad = None


_IS_MADE = "_ronde_is_made"


class Watcher:
    """Is notified of each gradient as soon as a backward pass has accumulated it.

    names           -- of the parameters, by which the ranks agree
    passes          -- backward passes before a step
    op, process_set -- how and by whom gradients, or changes of parameters, are reduced
    predivide       -- with Average, by how much gradients are divided before the sum
    delay           -- of each parameter, the backward passes that are left before its gradient is submitted
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
        """Begins with the parameters of an optimizer. The hooks go with this object: the model may get another one."""
        hook = weakref.WeakMethod(self._accumulated)

        def accumulated(parameter: torch.Tensor) -> None:
            if (method := hook()) is not None:
                method(parameter)

        for parameter in trainable(optimizer):
            self.watched.add(parameter)
            handle = parameter.register_post_accumulate_grad_hook(accumulated)
            self._finalizers.append(weakref.finalize(self, handle.remove))

    def leave(self) -> None:
        """Does not watch any more: the model gets another optimizer."""
        for remove in self._finalizers:
            remove()

    def reset(self) -> None:
        """Starts again, as after a step."""
        raise NotImplementedError

    def handles(self) -> MutableMapping[torch.Tensor, tuple[int, Any]]:
        """The reductions in flight."""
        raise NotImplementedError

    def set_passes(self, passes: int) -> None:
        """Changes how many backward passes are summed, also for gradients that were not submitted yet."""
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
        """Counts one backward pass: how many are left, which is negative after one too many."""
        left = self.delay.get(parameter, self.passes) - 1
        self.delay[parameter] = left
        return left

    def _accumulated(self, parameter: torch.Tensor) -> None:
        raise NotImplementedError

    def _name(self, parameter: torch.Tensor) -> str:
        # A parameter that was added later has no name; its place among all others is its name.
        return self.names.setdefault(parameter, f"noname.later.{len(self.names)}")


def too_many_passes(also: str = "") -> AssertionError:
    """A gradient came once more than a step takes."""
    return AssertionError(
        f"Gradients were computed more than backward_passes_per_step times before a call to step(){also}; increase "
        "backward_passes_per_step to accumulate gradients locally."
    )


class Wrapping(torch.optim.Optimizer):
    """The part of a distributed optimizer's class that does not depend on what is reduced.

    The attributes are those of Horovod's wrapper, with its meaning; programs for Horovod read and change them.
    """

    _ronde: Any  # its Watcher
    _wrapped: Any  # the optimizer that was given

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads the wrapped optimizer's state; reductions in flight are dropped."""
        self._ronde.reset()
        super().load_state_dict(state_dict)

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes are summed before a reduction. Setting it is `set_backward_passes_per_step`."""
        passes: int = self._ronde.passes
        return passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self._ronde.set_passes(passes)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes are summed before a reduction, from the next pass on.

        Passes that were counted since the last step do not count any more; a gradient that is in flight already is
        reduced without further passes. Raises ValueError below 1.
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
        """By how much gradients are divided before their sum, with op=Average."""
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
