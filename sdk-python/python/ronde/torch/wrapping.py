"""What all distributed optimizers have in common: hooks on gradients, and the class laid over the wrapped one's."""

from __future__ import annotations

import weakref
from typing import Any, Callable

import torch


def trainable(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters that get gradients, in the order of the groups, which is the same on all ranks."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]


class Watcher:
    """Is told of each gradient as soon as a backward pass has accumulated it.

    names  -- of the parameters, by which the ranks agree
    passes -- backward passes before a step
    """

    def __init__(self, names: dict[torch.Tensor, str], passes: int) -> None:
        self.names = names
        self.passes = passes
        self._finalizers: list[Callable[[], Any]] = []

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Begins with the parameters of an optimizer. The hooks go with this object: the model may get another one."""
        hook = weakref.WeakMethod(self._accumulated)

        def accumulated(parameter: torch.Tensor) -> None:
            if (method := hook()) is not None:
                method(parameter)

        for parameter in trainable(optimizer):
            handle = parameter.register_post_accumulate_grad_hook(accumulated)
            self._finalizers.append(weakref.finalize(self, handle.remove))

    def leave(self) -> None:
        """Does not watch any more: the model gets another optimizer."""
        for remove in self._finalizers:
            remove()

    def reset(self) -> None:
        """Begins anew, as after a step."""
        raise NotImplementedError

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
    """The part of a distributed optimizer's class that does not depend on what is reduced."""

    _ronde: Any  # its Watcher
    _wrapped: Any  # the optimizer that was given

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads the wrapped optimizer's state; reductions in flight are dropped."""
        self._ronde.reset()
        super().load_state_dict(state_dict)

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes are summed before a reduction."""
        passes: int = self._ronde.passes
        return passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes are summed before a reduction."""
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self._ronde.passes = passes
        self._ronde.reset()
