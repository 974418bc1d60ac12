"""States of models, optimizers, samplers and plain objects, and a registry for further types of objects."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ronde.elastic.state import ObjectState
from ronde.torch import functions, mpi_ops, objects
from ronde.torch.elastic.sampler import ElasticSampler


class StateHandler:
    """Saves, restores and synchronizes objects of one type. The constructor saves."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Saves the current state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restores the state that was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcasts the state of rank 0 to all ranks, and saves it."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Replaces the object."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """Handles objects with `state_dict` and `load_state_dict`."""

    def save(self) -> None:
        """Saves a copy of the current state in memory."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Restores the state that was saved last."""
        # An optimizer keeps the tensors that it loads, and changes them in place.
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_StateDictHandler):
    """Handles modules."""

    def sync(self) -> None:
        """Broadcasts the state of rank 0 to all ranks, and saves it."""
        functions.broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_StateDictHandler):
    """Handles optimizers."""

    def sync(self) -> None:
        """Broadcasts the state of rank 0 to all ranks, and saves it."""
        functions.broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_StateDictHandler):
    """Handles samplers."""

    def sync(self) -> None:
        """Sets the progress of all ranks to that of rank 0, and saves it."""
        self.value.load_state_dict(objects.broadcast_object(self.value.state_dict(), root_rank=0))
        self.save()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Returns the handlers by type, a mutable list. The first matching type is used."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replaces the handlers by type, for states that are created later."""
    global _registry  # noqa: PLW0603
    _registry = registry


class TorchState(ObjectState):
    """The state of a training: a model, an optimizer, and keyword arguments, as attributes.

    Saving copies modules, optimizers and samplers under any name; other objects are as in `ronde.elastic.ObjectState`.
    Assigning an attribute replaces its object.

        state = TorchState(model, optimizer, epoch=0, batch=0)
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        self._handlers: dict[str, StateHandler] = {}
        plain = {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            handler = next((handler for kind, handler in get_handler_registry() if isinstance(value, kind)), None)
            if handler is None:
                plain[name] = value
            else:
                super().__setattr__(name, value)
                self._handlers[name] = handler(value)
        super().__init__(objects.broadcast_object, mpi_ops.rank, **plain)

    def save(self) -> None:
        """Saves a copy of the current state in memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Restores the state that was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Broadcasts the state of rank 0 to all ranks, and saves it."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """Resets samplers after the session restarts: they divide the rest of the epoch among the current ranks."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name].set_value(value)
        super().__setattr__(name, value)
