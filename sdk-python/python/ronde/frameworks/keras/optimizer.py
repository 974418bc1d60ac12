"""Subclasses of the optimizers of Keras 3 and tf-keras that reduce gradients before they apply them."""

from __future__ import annotations

import copy
import sys
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Reducer(Protocol):
    """How gradients of a back end are reduced."""

    def begin(self) -> Any:
        """Returns the state of an optimizer, such as sums of gradients."""
        ...

    def run(
        self,
        state: Any,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        apply: Callable[[list[Any]], Any],
        skip: Callable[[], Any],
    ) -> Any:
        """Reduces gradients and applies them, or skips this pass."""
        ...

    def register_local(self, variable: Any) -> None:
        """Leaves a variable's gradient unreduced."""
        ...


class _Distributed:
    """What all subclasses have.

    The reducer is one of the class, so that an optimizer from `from_config` has it, too.
    """

    _HAS_AGGREGATE_GRAD = True
    _ronde_reducer: Reducer

    def register_local_var(self, variable: Any) -> None:
        """Leaves the gradient of a variable as it is on this rank, or divides it by the number of ranks."""
        self._ronde_reducer.register_local(variable)

    def _ronde_run(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        apply: Callable[[list[Any]], Any],
        skip: Callable[[], Any],
    ) -> Any:
        state = self.__dict__.get("_ronde_state")
        if state is None:
            state = self._ronde_reducer.begin()
            # Not by `setattr`, which tracks it as a part of checkpoints.
            self.__dict__["_ronde_state"] = state
        return self._ronde_reducer.run(state, gradients, variables, apply, skip)


def refuse_loss_scale(optimizer: Any) -> None:
    """Raises ValueError if a LossScaleOptimizer calls this optimizer.

    It checks for infinities in the gradients of its rank only, and skips the call when it finds one: then the other
    ranks wait for this one, or are a step ahead of it.
    """
    frame = sys._getframe(1)
    for _ in range(_FRAMES_MAX):
        caller = frame.f_locals.get("self")
        names = {kind.__name__ for kind in type(caller).__mro__}
        if names & _LOSS_SCALES and getattr(caller, "inner_optimizer", None) is optimizer:
            raise ValueError(
                "a LossScaleOptimizer around a DistributedOptimizer would decide on each rank alone whether to skip a "
                "step; with mixed_float16, compile() makes one. Give hvd.DistributedOptimizer("
                "keras.mixed_precision.LossScaleOptimizer(optimizer)), or use mixed_bfloat16"
            )
        if frame.f_back is None:
            return
        frame = frame.f_back


_FRAMES_MAX = 60
"""Between the two are decorators, branches and strategies of Keras and TensorFlow: about 20 frames."""
_LOSS_SCALES = {"LossScaleOptimizer", "BaseLossScaleOptimizer"}


class _Keras3(_Distributed):
    """For Keras 3, whose trainers call `apply`, and that for JAX `stateless_apply`, which calls `apply`."""

    built: bool
    _trainable_variables: list[Any]

    def build(self, variables: Any) -> Any:
        """Creates the variables of the optimizer. Raises ValueError if a LossScaleOptimizer has this one inside."""
        refuse_loss_scale(self)
        parent: Any = super()
        return parent.build(variables)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Updates variables by gradients that are reduced over all ranks."""
        gradients = list(grads)
        parent: Any = super()
        is_reduced = self.__dict__.get("_ronde_has_reduced", False)
        if is_reduced or not gradients or (trainable_variables is None and not self.built):
            return parent.apply(gradients, trainable_variables)
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if not self.built:
            me: Any = self
            me.build(variables)
        return self._ronde_run(gradients, variables, lambda reduced: parent.apply(reduced, variables), self._ronde_skip)

    def _ronde_skip(self) -> Any:
        # A LossScaleOptimizer counts in the one inside.
        me: Any = getattr(self, "inner_optimizer", self)
        me._iterations.assign_add(1)

    def stateless_apply(self, optimizer_variables: Any, grads: Any, trainable_variables: Any) -> Any:
        """Returns the variables after an update by gradients that are reduced over all ranks, for Keras on JAX."""
        parent: Any = super()

        def apply(reduced: list[Any]) -> Any:
            self.__dict__["_ronde_has_reduced"] = True
            try:
                return parent.stateless_apply(optimizer_variables, reduced, trainable_variables)
            finally:
                del self.__dict__["_ronde_has_reduced"]

        return self._ronde_run(list(grads), self._trainable_variables, apply, self._ronde_skip)


class _Keras2(_Distributed):
    """For tf-keras, whose optimizers all have `apply_gradients`."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Updates variables by gradients that are reduced over all ranks."""
        pairs = list(grads_and_vars)
        parent: Any = super()
        if not pairs:
            return parent.apply_gradients(pairs, *args, **kwargs)
        gradients, variables = zip(*pairs)
        me: Any = self
        if "_ronde_state" not in self.__dict__:
            refuse_loss_scale(self)
        if hasattr(me, "build"):
            me.build(variables)
        elif hasattr(me, "_create_all_weights"):
            me._create_all_weights(list(variables))

        def apply(reduced: list[Any]) -> Any:
            return parent.apply_gradients(list(zip(reduced, variables)), *args, **kwargs)

        return self._ronde_run(list(gradients), variables, apply, self._ronde_skip)

    def _ronde_skip(self) -> Any:
        me: Any = self
        return me.iterations.assign_add(1)


def variables_of_layers(layers: Any) -> list[Any]:
    """Returns the trainable variables of layers of Keras, one or a list. Raises ValueError for anything else."""
    if layers is None:
        return []
    listed = layers if isinstance(layers, (list, tuple)) else [layers]
    for layer in listed:
        if not all(hasattr(layer, name) for name in ("trainable_weights", "add_weight", "build")):
            raise ValueError(f"all local layers must be of type tf.keras.layers.Layer, not {type(layer).__name__}")
    return [variable for layer in listed for variable in layer.trainable_weights]


def is_keras_3(optimizer: Any) -> bool:
    """Returns whether an object is an optimizer of Keras 3."""
    return all(hasattr(optimizer, name) for name in ("apply", "apply_gradients", "stateless_apply"))


def is_keras_2(optimizer: Any) -> bool:
    """Returns whether an object is an optimizer of tf-keras."""
    return hasattr(optimizer, "apply_gradients") and hasattr(optimizer, "get_config") and not is_keras_3(optimizer)


def wrap(optimizer: Any, name: str | None, reducer: Reducer) -> Any:
    """Returns a copy of an optimizer, with its state, that reduces gradients. Do not use the given one any more.

    name -- of the copy; default: "Distributed" and the name of the class

    Its class has the name and the module of the given one's, so saved models contain nothing of ronde.

    Raises ValueError for anything that is no optimizer of Keras, and one that reduces already.
    """
    if isinstance(optimizer, _Distributed):
        raise ValueError("this optimizer is a DistributedOptimizer already; wrap it once")
    if not is_keras_3(optimizer) and not is_keras_2(optimizer):
        raise ValueError(f"{type(optimizer).__name__} is no optimizer of tf.compat.v1.train, Keras 3 or tf-keras")
    kind = distributed_class(type(optimizer), reducer)
    config = optimizer.get_config()
    # One whose configuration has no name may have no argument for it.
    if name or "name" in config:
        config["name"] = name or f"Distributed{type(optimizer).__name__}"
    if is_keras_2(optimizer) and _has_state(optimizer):
        # It does not know for which variables it was built. The copy has the same variables of state.
        wrapped = copy.copy(optimizer)
        wrapped.__class__ = kind
        if "name" in config:
            # Optimizers of the older kind have this attribute.
            setattr(wrapped, "_name" if hasattr(wrapped, "_name") else "name", config["name"])
        return wrapped
    wrapped = kind.from_config(config)
    _copy_exclusions(optimizer, wrapped)
    if is_keras_3(optimizer) and optimizer.built:
        wrapped.build(optimizer._trainable_variables)
        for mine, given in zip(wrapped.variables, optimizer.variables):
            mine.assign(given)
    return wrapped


_EXCLUSIONS = (
    "_exclude_from_weight_decay",
    "_exclude_from_weight_decay_names",
    "_exclude_from_weight_decay_pattern",
)
"""The attributes in which Keras 3 and tf-keras keep the variables of `exclude_from_weight_decay`."""


def _copy_exclusions(given: Any, made: Any) -> None:
    """Copies what `exclude_from_weight_decay` has excluded, which no configuration contains.

    An optimizer inside, such as that of a LossScaleOptimizer, has exclusions of its own.
    """
    for name in _EXCLUSIONS:
        # Not by `getattr`: the older LossScaleOptimizer of tf-keras returns attributes of the one inside.
        if name in vars(given):
            setattr(made, name, copy.copy(vars(given)[name]))
    inner = getattr(given, "inner_optimizer", None)
    if inner is not None:
        _copy_exclusions(inner, made.inner_optimizer)


def _has_state(optimizer: Any) -> bool:
    """Whether an optimizer of tf-keras was built; those of its older kind have weights then."""
    return bool(getattr(optimizer, "_built", False) or getattr(optimizer, "_weights", None))


def distributed_class(kind: type, reducer: Reducer) -> Any:
    """Returns a subclass of an optimizer's class that reduces gradients."""
    base = _Keras3 if hasattr(kind, "stateless_apply") else _Keras2
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "_ronde_reducer": reducer}
    created: Any = type(kind.__name__, (base, kind), names)
    # Keras saves a class of its API under the API's name. Other classes are saved under that of their module.
    api: Any = sys.modules.get("keras.src.api_export")
    names_of_api = getattr(api, "REGISTERED_OBJS_TO_NAMES", {})
    if kind in names_of_api:
        names_of_api[created] = names_of_api[kind]
    return created
