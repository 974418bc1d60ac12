"""Training that restores its last commit and continues when a collective fails.

state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0, batch=0)

@hvd.elastic.run
def train(state): ...

train(state)
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Callable, TypeVar

import numpy
import tensorflow as tf

from ronde import _ronde
from ronde.elastic.loop import run_converted
from ronde.elastic.state import HostsUpdatedInterrupt, HostUpdateResult, ObjectState, State
from ronde.errors import MismatchError, PeerLostError, RondeError, TimedOutError
from ronde.frameworks import basics, world
from ronde.frameworks.agreement import AgreeingState
from ronde.frameworks.process_sets import global_process_set
from ronde.tensorflow import mpi_ops
from ronde.tensorflow.functions import assigned, broadcast_variables, check_alike
from ronde.tensorflow.reduction import reference

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "State",
    "TensorFlowKerasState",
    "TensorFlowState",
    "run",
]

Result = TypeVar("Result")
_MISMATCH = "Mismatched"
"""The word of the sidecar's errors for ranks that disagree, which is Horovod's."""


def run(func: Callable[..., Result]) -> Callable[..., Result]:
    """Decorates `func(state, *args, **kwargs)` with the loop of `ronde.elastic.run_fn`, on the session of `init`.

    Errors of TensorFlow that failed collectives raise are failures of collectives, also those of the state.
    """
    return run_converted(func, basics.init_again, converted)


@contextlib.contextmanager
def converted() -> Iterator[None]:
    """Raises an error of ronde for one of TensorFlow that a failed collective raised."""
    try:
        yield
    except tf.errors.OpError as error:
        if (failure := failure_of(error)) is None:
            raise
        raise failure from error


def failure_of(error: Any) -> RondeError | None:
    """Returns the error of ronde for an error of TensorFlow; None for one that no operation of ronde raised."""
    text = str(error)
    known = _ronde.xla_failure(text)
    if isinstance(known, RondeError):
        return known
    is_over = world.is_begun() and not world.current().client.native_session.is_open
    if "Ronde" not in text and not is_over:
        return None
    if isinstance(error, tf.errors.AbortedError) or is_over:
        return PeerLostError(text, "rank_lost", blame="peer")
    if isinstance(error, tf.errors.DeadlineExceededError):
        return TimedOutError(text, "timed_out", blame="peer")
    # With Horovod's codes ranks that disagree have the second one, as the lack of a session does.
    has_horovods_code = isinstance(error, tf.errors.FailedPreconditionError) and _MISMATCH in text
    if isinstance(error, tf.errors.InvalidArgumentError) or has_horovods_code:
        return MismatchError(text, "mismatch")
    return RondeError(text)


class _VariablesState(AgreeingState):
    """A state with variables of TensorFlow, of which copies in main memory are saved.

    They have their values in a session of TensorFlow 1, or by themselves when executing eagerly.
    """

    def __init__(self, **kwargs: Any) -> None:
        self._copies: list[tuple[Any, Any]] = []
        self._operations: dict[Any, Any] = {}
        super().__init__(**kwargs)

    def _variables(self) -> Sequence[Any]:
        raise NotImplementedError

    def _session(self) -> Any:
        """Returns the session of TensorFlow 1 in which the variables have values; None when executing eagerly."""
        raise NotImplementedError

    def save(self) -> None:
        """Saves a copy of the current state in memory."""
        variables = [reference(each) for each in self._variables()]
        session = self._session()
        if session is None:
            values = [each.numpy() for each in variables]
        else:
            # The value of a reference variable is its memory, which optimizers change in place.
            values = [numpy.array(each) for each in session.run(variables)]
        self._copies = list(zip(variables, values))
        super().save()

    def restore(self) -> None:
        """Restores the state that was saved last."""
        session = self._session()
        for variable, value in self._copies:
            if session is None:
                variable.assign(value)
            else:
                initializer = variable.initializer
                session.run(initializer, {initializer.inputs[1]: value})
        super().restore()

    def sync(self) -> None:
        """Gives all ranks the state of rank 0, and saves it. Raises ValueError on all ranks if variables differ."""
        self._broadcast_variables()
        super().sync()
        self.save()

    def _broadcast_variables(self) -> None:
        session = self._session()
        if session is None:
            broadcast_variables(self._variables(), root_rank=0)
            return
        variables = [reference(each) for each in self._variables()]
        with session.graph.as_default(), session.graph.name_scope(None):
            number = mpi_ops.set_number(global_process_set)
            check_alike(variables, global_process_set)
            key = (number, *(each.ref() for each in variables))
            if key not in self._operations:
                # Once in a graph: a second one would have other names than that of a new worker. Names contain the
                # number of variables, as an optimizer may get its variables after the first synchronization.
                name = f"ronde.elastic.{number}.{len(variables)}"
                self._operations[key] = tf.group(*assigned(variables, 0, name, global_process_set))
            session.run(self._operations[key])


class TensorFlowKerasState(_VariablesState):
    """The state of a training run with Keras: a model, its optimizer, and keyword arguments, as attributes.

    In a graph of TensorFlow 1, for tf-keras, variables have their values in the session of Keras.

    model     -- a built model
    optimizer -- default: that with which the model was compiled
    backend   -- accepted for Horovod's programs; has no effect

        state = TensorFlowKerasState(model, optimizer, epoch=0, batch=0)

    Raises ValueError for a model that is not built: it has no variables yet.
    """

    def __init__(self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any) -> None:
        del backend
        if not getattr(model, "built", True):
            raise ValueError(
                "Model must be built first. Run `model.build(input_shape)` or call the model on a batch, before "
                "TensorFlowKerasState"
            )
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        super().__init__(**kwargs)
        self.save()

    def _variables(self) -> Sequence[Any]:
        variables = getattr(self.optimizer, "variables", [])
        of_optimizer = variables() if callable(variables) else variables
        unique = {id(reference(each)): each for each in [*self.model.variables, *of_optimizer]}
        return list(unique.values())

    def _session(self) -> Any:
        return None if tf.executing_eagerly() else tf.compat.v1.keras.backend.get_session()

    def sync(self) -> None:
        """Gives all ranks the state of rank 0, and saves it. Raises ValueError on all ranks if variables differ.

        An optimizer of Keras 3 or tf-keras is built first, as new workers have no variables of it yet.
        """
        build = getattr(self.optimizer, "build", None)
        if build is None:
            # The legacy optimizers of tf-keras create what is missing.
            create = getattr(self.optimizer, "_create_all_weights", None)
            if create is not None:
                create(self.model.trainable_variables)
        elif not getattr(self.optimizer, "built", getattr(self.optimizer, "_built", False)):
            build(self.model.trainable_variables)
        super().sync()


class TensorFlowState(_VariablesState):
    """The state of a training run with variables: those given, and keyword arguments, as attributes.

    variables -- default: all variables of the graph of TensorFlow 1
    session   -- the session of TensorFlow 1, in which they have values; None when executing eagerly

    Raises ValueError without `variables` when executing eagerly: there is no list of all variables then.
    """

    def __init__(self, variables: Any = None, session: Any = None, **kwargs: Any) -> None:
        if variables is None and session is None and tf.executing_eagerly():
            raise ValueError(
                "TensorFlowState has no variables: give a list of them, as TensorFlow knows of all only in a graph of "
                "TensorFlow 1. For values alone use hvd.elastic.ObjectState"
            )
        self.variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        self.session = session
        super().__init__(**kwargs)
        self.save()

    def _variables(self) -> Sequence[Any]:
        return self.variables

    def _session(self) -> Any:
        return self.session
