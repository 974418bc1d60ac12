"""Elastic training with Keras 3: the state, the callbacks and the loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, TypeVar

import keras

from ronde.elastic.loop import run_fn
from ronde.elastic.state import HostsUpdatedInterrupt
from ronde.frameworks import basics
from ronde.frameworks.agreement import AgreeingState
from ronde.frameworks.keras import elastic
from ronde.frameworks.keras.callbacks import write_back
from ronde.keras.backend import NAME, backend

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "CommitStateCallback",
    "HostsUpdatedInterrupt",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]

_Base: Any = keras.callbacks.Callback
Result = TypeVar("Result")


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates `func(state, *args, **kwargs)` with the loop of `ronde.elastic.run_fn`, on the session of `init`."""
    if NAME == "tensorflow":
        from ronde.tensorflow.elastic import run as run_in_tensorflow

        return run_in_tensorflow(func)
    if NAME == "jax":
        from ronde.jax.elastic import run_on

        return run_on(func, basics.init_again)
    return run_fn(func, basics.init_again)


class KerasState(AgreeingState):
    """The state of a training run: a model, its optimizer, and keyword arguments, as attributes.

    model     -- a built model
    optimizer -- default: that with which the model was compiled

    Raises ValueError for a model that is not built: it has no variables yet.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not getattr(model, "built", True):
            raise ValueError("Model must be built first. Run `model.build(input_shape)` before KerasState")
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        self._copies: list[tuple[Any, Any]] = []
        self._interrupted: list[tuple[Any, Any]] = []
        super().__init__(**kwargs)
        self.save()

    def _variables(self) -> Sequence[Any]:
        of_optimizer = [] if self.optimizer is None else list(self.optimizer.variables)
        return list({id(each): each for each in [*self.model.variables, *of_optimizer]}.values())

    def _copied(self) -> list[tuple[Any, Any]]:
        """Returns the variables, each with a copy of its value."""
        write_back(self.model)
        return [(each, keras.ops.convert_to_numpy(each).copy()) for each in self._variables()]

    def save(self) -> None:
        """Saves a copy of the current state in memory."""
        self._copies = self._copied()
        super().save()

    def restore(self) -> None:
        """Restores the state that was saved last."""
        self._interrupted = []
        for variable, value in self._copies:
            variable.assign(value)
        super().restore()

    def check_host_updates(self) -> None:
        """Raises HostsUpdatedInterrupt on all ranks at once, if rank 0 was notified that the hosts have changed."""
        try:
            super().check_host_updates()
        except HostsUpdatedInterrupt:
            self._interrupted = self._copied()
            raise

    def reset(self) -> None:
        """Puts back the values that the variables had at an interrupt.

        With JAX, a `fit` that raises ends as one that is complete: with `use_ema`, it leaves averages in the model.
        """
        super().reset()
        for variable, value in self._interrupted:
            variable.assign(value)
        self._interrupted = []

    def sync(self) -> None:
        """Gives all ranks the state of rank 0, and saves it. Raises ValueError on all ranks if variables differ."""
        if self.optimizer is not None and not self.optimizer.built:
            self.optimizer.build(self.model.trainable_variables)
        backend.broadcast_variables(self._variables(), 0)
        super().sync()
        self.save()


class CommitStateCallback(elastic.CommitStateCallback, _Base): ...


class UpdateBatchStateCallback(elastic.UpdateBatchStateCallback, _Base): ...


class UpdateEpochStateCallback(elastic.UpdateEpochStateCallback, _Base): ...
