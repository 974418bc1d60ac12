"""The optimizer for Adasum: each rank makes a local step, and ranks reduce the changes of the parameters."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable

import torch

from ronde.frameworks import world
from ronde.frameworks.window import Window
from ronde.ops import Adasum
from ronde.torch import gradients
from ronde.torch.wrapping import Watcher, Wrapping, too_many_passes, trainable

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping

    from ronde.frameworks.process_sets import ProcessSet
    from ronde.torch.compression import Compressor, PluginCompressor


class DeltaReducer(Watcher):
    """Reduces the changes of one optimizer's parameters, and counts backward passes."""

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        compression: type[Compressor] | PluginCompressor,
        passes: int,
        process_set: ProcessSet,
    ) -> None:
        super().__init__(names, passes, Adasum, process_set)
        self._compression = compression

    def reset(self) -> None:
        """Resets the counts, as after a step."""
        self._start_delays()

    def handles(self) -> MutableMapping[torch.Tensor, tuple[int, Any]]:
        """Always empty: gradients are not reduced, and a step waits for the reductions of its changes."""
        return {}

    def local(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wraps a closure so that backward passes are counted for each call of it."""

        def evaluate() -> Any:
            self._start_delays()
            return closure()

        return evaluate

    def reduce(self, parameters: list[torch.Tensor], before: list[torch.Tensor]) -> None:
        """Sets each parameter to its value `before` plus the Adasum of the changes of the set's ranks.

        Overwrites `before`.
        """
        self._start_delays()
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
        if self._count_down(parameter) < 0:
            raise too_many_passes()

    def begin(self, parameter: torch.Tensor, change: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts the reduction of one change. The returned function waits for it."""
        name = self._name(parameter)
        compressed, context = self._compression.compress(change)
        handle = gradients.begin_allreduce(compressed, f"adasum.{name}", Adasum, 1.0, 1.0, self.process_set)
        return lambda: self._compression.decompress(world.synchronize(handle), context)


class _Move:
    """The update of one parameter. Calling it starts the reduction; `wait` applies the result."""

    def __init__(self, reducer: DeltaReducer, parameter: torch.Tensor, change: torch.Tensor) -> None:
        self._reducer = reducer
        self._parameter = parameter
        self._change = change
        self._finish: Callable[[], torch.Tensor] | None = None

    def __call__(self) -> _Move:
        self._finish = self._reducer.begin(self._parameter, self._change)
        return self

    def wait(self) -> None:
        assert self._finish is not None  # the window calls this object before it waits
        self._parameter.add_(self._finish())


class AdasumDistributed(Wrapping):
    """The mixin over the wrapped optimizer's class."""

    _ronde: DeltaReducer

    def synchronize(self) -> None:
        """Does nothing: gradients stay local to this rank, and can be clipped locally."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Raises AssertionError: a step always reduces."""
        raise AssertionError("Skipping synchronization is not supported when using Adasum optimizer.")
        yield

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Makes a step of the wrapped optimizer on this rank, then reduces the changes.

        closure -- recomputes loss and gradients of this rank's data; the number of calls may differ between ranks
        """
        parameters = trainable(self)
        before = [parameter.detach().clone() for parameter in parameters]
        self._wrapped._opt_called = True  # PyTorch's schedulers warn without it
        result = super().step(None if closure is None else self._ronde.local(closure))
        self._ronde.reduce(parameters, before)
        return result


# PyTorch installs hooks over a class's step once; the wrapped class has them already.
AdasumDistributed.step.hooked = True  # type: ignore[attr-defined]
