"""A state of models, optimizers, samplers and plain objects, and how further kinds of objects are added."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ronde.elastic.state import ObjectState
from ronde.torch import functions, mpi_ops, objects
from ronde.torch.elastic.sampler import ElasticSampler


class StateHandler:
    """How objects of one kind are saved, restored and made the same on all ranks. Saves when it is made."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Keeps the present state in memory."""
        raise NotImplementedError

    def restore(self) -> None:
        """Goes back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Makes the state of rank 0 that of all ranks, and saves it."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Takes care of another object from now on."""
        self.value = value
        self.save()


class _StateDictHandler(StateHandler):
    """For what has `state_dict` and `load_state_dict`."""

    def save(self) -> None:
        """Keeps a copy of the present state in memory."""
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        """Goes back to what was saved last."""
        # An optimizer keeps the tensors that it loads, and changes them in place.
        self.value.load_state_dict(copy.deepcopy(self._saved))


class ModelStateHandler(_StateDictHandler):
    """For modules."""

    def sync(self) -> None:
        """Makes the state of rank 0 that of all ranks, and saves it."""
        functions.broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_StateDictHandler):
    """For optimizers."""

    def sync(self) -> None:
        """Makes the state of rank 0 that of all ranks, and saves it."""
        functions.broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_StateDictHandler):
    """For samplers."""

    def sync(self) -> None:
        """Goes on, on all ranks, where rank 0 is, and saves that."""
        self.value.load_state_dict(objects.broadcast_object(self.value.state_dict(), root_rank=0))
        self.save()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Which handler is for which type; the first one that fits counts. May be changed."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    """Replaces which handler is for which type, for states that are made from now on."""
    global _registry  # noqa: PLW0603
    _registry = registry


class TorchState(ObjectState):
    """The state of a training: a model, an optimizer, and whatever is given by name, as attributes.

    Modules, optimizers and samplers, under any name, are copied when they are saved; other things are as in
    `ronde.elastic.ObjectState`. Another object that is assigned to an attribute takes the place of the former.

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
        """Keeps a copy of the present state in memory."""
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Goes back to what was saved last."""
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        """Makes the state of rank 0 that of all ranks, and saves it."""
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """The session was begun anew: samplers divide what is left among the ranks that there are."""
        for handler in self._handlers.values():
            if isinstance(handler, SamplerStateHandler):
                handler.value.reset()

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__.get("_handlers", {})
        if name in handlers:
            handlers[name].set_value(value)
        super().__setattr__(name, value)
