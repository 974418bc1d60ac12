"""The optimizer for Adasum: each rank steps by itself, and the changes of the parameters are reduced."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Any, Callable

import torch

from ronde.ops import Adasum
from ronde.torch import gradients, world
from ronde.torch.process_sets import global_process_set
from ronde.torch.reducer import trainable
from ronde.torch.window import Window

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ronde.torch.compression import Compressor


class DeltaReducer:
    """How the changes of one optimizer's parameters are reduced."""

    def __init__(self, names: dict[torch.Tensor, str], compression: type[Compressor], passes: int) -> None:
        self.names = names
        self.passes = passes
        self._compression = compression
        self._passed: dict[torch.Tensor, int] = {}
        self._finalizers: list[Callable[[], Any]] = []

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Counts the backward passes of each parameter."""
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
        self._passed.clear()

    def reduce(self, parameters: list[torch.Tensor], before: list[torch.Tensor]) -> None:
        """Puts each parameter where it was, moved by the Adasum of all ranks' changes. Overwrites `before`."""
        self._passed.clear()
        window = Window()
        with torch.no_grad():
            for parameter, start in zip(parameters, before):
                change = parameter - start
                parameter.copy_(start)
                start.copy_(change)
            for parameter, change in zip(parameters, before):
                window.submit(change.numel() * change.element_size(), _Move(self, parameter, change))
            window.finish()

    def _accumulated(self, parameter: torch.Tensor) -> None:
        passed = self._passed[parameter] = self._passed.get(parameter, 0) + 1
        if passed > self.passes:
            raise AssertionError(
                "Gradients were computed more than backward_passes_per_step times before a call to step(); increase "
                "backward_passes_per_step to accumulate gradients locally."
            )

    def begin(self, parameter: torch.Tensor, change: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The reduction of one change, in flight."""
        name = self.names.setdefault(parameter, f"noname.later.{len(self.names)}")
        compressed, context = self._compression.compress(change)
        handle = gradients.begin_allreduce(compressed, f"adasum.{name}", Adasum, 1.0, 1.0, global_process_set)
        return lambda: self._compression.decompress(world.synchronize(handle), context)


class _Move:
    """One parameter's move: called to begin, waited for to end."""

    def __init__(self, reducer: DeltaReducer, parameter: torch.Tensor, change: torch.Tensor) -> None:
        self._reducer = reducer
        self._parameter = parameter
        self._change = change
        self._finish: Callable[[], torch.Tensor] | None = None

    def __call__(self) -> _Move:
        self._finish = self._reducer.begin(self._parameter, self._change)
        return self

    def wait(self) -> None:
        assert self._finish is not None  # the window calls before it waits
        self._parameter.add_(self._finish())


class AdasumDistributed(torch.optim.Optimizer):
    """What is laid over the wrapped optimizer's class."""

    _ronde: DeltaReducer
    _wrapped: Any

    def synchronize(self) -> None:
        """Does nothing: gradients stay this rank's own, and can be clipped as such."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises AssertionError: a step always reduces."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step of the wrapped optimizer on this rank, then reduces what it has changed."""
        parameters = trainable(self)
        before = [parameter.detach().clone() for parameter in parameters]
        self._wrapped._opt_called = True  # PyTorch's schedulers warn without it
        result = super().step(closure)
        self._ronde.reduce(parameters, before)
        return result

    def load_state_dict(self, state_dict: Any) -> None:
        """Loads the wrapped optimizer's state."""
        self._ronde.reset()
        super().load_state_dict(state_dict)

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Changes how many backward passes may come before a step."""
        if passes <= 0:
            raise ValueError("backward_passes_per_step must be > 0")
        self._ronde.passes = passes
        self._ronde.reset()


# PyTorch lays hooks over a class's step once; the wrapped class has them.
AdasumDistributed.step.hooked = True  # type: ignore[attr-defined]
