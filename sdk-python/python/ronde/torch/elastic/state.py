"""States of models, optimizers, samplers and plain objects, and a registry for further types of objects."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ronde.frameworks.agreement import AgreeingState
from ronde.torch import functions, mpi_ops, objects, optimizer_state
from ronde.torch.elastic import alike, handover
from ronde.torch.elastic.chunks import Part
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

    def parts(self, name: str) -> list[Part]:
        """Returns the tensors, to be handed over. They are named after the attribute."""
        trained = dict(self.value.named_parameters(remove_duplicate=False))
        return [
            Part(f"{name}.{key}", tensor, is_buffer=key not in trained)
            for key, tensor in functions.named_tensors(self.value.state_dict())
        ]


class OptimizerStateHandler(_StateDictHandler):
    """Handles optimizers."""

    def sync(self) -> None:
        """Broadcasts the state of rank 0 to all ranks, and saves it."""
        functions.broadcast_optimizer_state(self.value, root_rank=0)
        self.save()

    def parts(self, name: str) -> list[Part]:
        """Gives the optimizer the options and the structure of rank 0's. Returns the tensors, to be handed over.

        All ranks call it. There are none for an optimizer that has other tensors than dense ones of PyTorch: those of
        rank 0 are broadcast.
        """
        had_state = bool(self.value.state)
        description = functions.optimizer_structure(self.value, root_rank=0)
        if not optimizer_state.is_dense(description):
            functions.broadcast_optimizer_state(self.value, root_rank=0)
            return []
        if not had_state:
            functions.make_gradients(self.value)
        tensors = optimizer_state.tensors_of(self.value, description)
        return [Part(f"{name}.{key}", tensor) for key, tensor in tensors]


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


class TorchState(AgreeingState):
    """The state of a training run: a model, an optimizer, and keyword arguments, as attributes.

    Saving copies modules, optimizers and samplers under any name; other objects are as in `ronde.elastic.ObjectState`.
    Assigning an attribute replaces its object.

        state = TorchState(model, optimizer, epoch=0, batch=0)
    """

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        self._handlers: dict[str, StateHandler] = {}
        self._is_synced = False
        plain = {}
        for name, value in {"model": model, "optimizer": optimizer, **kwargs}.items():
            handler = next((handler for kind, handler in get_handler_registry() if isinstance(value, kind)), None)
            if handler is None:
                plain[name] = value
            else:
                super().__setattr__(name, value)
                self._handlers[name] = handler(value)
        super().__init__(**plain)

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
        """Gives all ranks the state of rank 0, and saves it.

        Models and optimizers are sent only to ranks that have not trained with the others, from several ranks. They
        are compared by their digests, and checked after receipt. A rank that trained with the others and has another
        state gets that of rank 0, with a warning. Everything else is broadcast by rank 0.

        Raises ValueError on a rank whose state has other attributes, or whose model has other parameters, than that of
        rank 0. In a job that is not elastic it raises ValueError on all ranks. Raises StateCorruptError on a rank that
        received other bytes than rank 0 has.
        """
        objects_by_name = {name: handler.value for name, handler in self._handlers.items()}
        alike.check(objects_by_name, sorted(self._saved_state))
        self._hand_over()
        super().sync()
        self._is_synced = True

    def _hand_over(self) -> None:
        """Gives all ranks the objects of rank 0, and saves them."""
        parts: list[Part] = []
        handed_over: list[StateHandler] = []
        for name, handler in self._handlers.items():
            # A handler of a subclass synchronizes its object in its own way.
            if mpi_ops.size() > 1 and type(handler) in (ModelStateHandler, OptimizerStateHandler):
                assert isinstance(handler, (ModelStateHandler, OptimizerStateHandler))
                handed_over.append(handler)
                parts += handler.parts(name)
            else:
                handler.sync()
        if parts:
            handover.hand_over(parts, self._is_synced)
        for handler in handed_over:
            handler.save()

    def _is_alone(self) -> bool:
        return mpi_ops.size() == 1

    def _rank_here(self) -> int:
        return mpi_ops.rank()

    def _object_of_rank_0(self, obj: Any) -> Any:
        return objects.broadcast_object(obj)

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
