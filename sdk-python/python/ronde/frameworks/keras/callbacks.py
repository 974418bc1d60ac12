"""The callbacks, without their base class: that of the Keras that a program uses.

`Backend` is what they need of `ronde.tensorflow.keras` or `ronde.keras`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy

from ronde.frameworks import process_sets, world
from ronde.ops import Average

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Backend(Protocol):
    """What callbacks need of a back end."""

    def broadcast_variables(self, variables: Iterable[Any], root_rank: int) -> Any:
        """Assigns the values of a rank to variables."""
        ...

    def is_variable(self, given: Any) -> bool:
        """Whether an object is a variable."""
        ...

    def reference(self, variable: Any) -> Any:
        """Returns the object by which a variable is the same."""
        ...

    def value_of(self, variable: Any) -> Any:
        """Returns the value of a variable: a number or an array."""
        ...

    def multiply(self, variable: Any, factor: float) -> None:
        """Multiplies a variable in place."""
        ...


class BroadcastGlobalVariablesCallback:
    """Assigns the variables of rank `root_rank`'s model and optimizer to all ranks, after the first batch.

    root_rank       -- the rank whose values all ranks get
    device          -- accepted for Horovod's programs; has no effect
    local_variables -- variables that keep their values on each rank

    The optimizer has its variables only then. Raises ValueError for local variables that are none.
    """

    backend: Backend
    model: Any

    def __init__(self, root_rank: int, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank, self.device = root_rank, device
        self.broadcast_done = False
        self._local: dict[int, Any] = {}
        for variable in local_variables or []:
            if not self.backend.is_variable(variable):
                raise ValueError(f"all local variables must be of type tf.Variable, not {type(variable).__name__}")
            known = self.backend.reference(variable)
            self._local[id(known)] = known

    def on_train_begin(self, logs: Any = None) -> None:
        """A further call of `fit` broadcasts again, after a restart of the session for example."""
        del logs
        self.broadcast_done = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcasts after the first batch."""
        del batch, logs
        if self.broadcast_done:
            return
        write_back(self.model)
        optimizer = getattr(self.model, "optimizer", None)
        variables = [*self.model.variables, *_variables_of(optimizer)]
        unique = {id(self.backend.reference(each)): each for each in variables}
        sent = [each for number, each in unique.items() if number not in self._local]
        self.backend.broadcast_variables(sent, self.root_rank)
        self.broadcast_done = True


def write_back(model: Any) -> None:
    """Makes the variables of a model those of the training. With JAX, `fit` keeps these in its program meanwhile."""
    if (synchronize := getattr(model, "jax_state_sync", None)) is not None:
        synchronize()


def _variables_of(optimizer: Any) -> list[Any]:
    """The variables of an optimizer: a list in Keras 3, a method or a list in tf-keras."""
    variables = getattr(optimizer, "variables", [])
    return list(variables() if callable(variables) else variables)


class MetricAverageCallback:
    """Averages the metrics of an epoch over all ranks. Put it before callbacks that use them.

    device -- accepted for Horovod's programs; has no effect

    All ranks must have the same metrics.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self.device = device

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Averages the values in `logs`, in place."""
        del epoch
        if logs:
            average_in_place(logs)


def average_in_place(logs: dict[str, Any]) -> None:
    """Averages the values of a dictionary over all ranks, in the order of their names."""
    names = sorted(logs)
    values = numpy.array([float(logs[name]) for name in names], dtype=numpy.float64)
    members = process_sets.members_of(process_sets.global_process_set)
    averages = world.current().client.allreduce(values, Average, "keras.metrics", process_set=members)
    for name, value in zip(names, averages):
        logs[name] = float(value)


class LearningRateScheduleCallback:
    """Sets the learning rate to `initial_lr` times a multiplier, from `start_epoch` to before `end_epoch`.

    initial_lr      -- the learning rate that is multiplied
    multiplier      -- a number, or a function of the epoch, which has a fraction unless `staircase` is set
    staircase       -- whether the rate changes between epochs only, rather than with each batch
    momentum_correction -- whether momentum is corrected when the rate changes, as in "Accurate, Large Minibatch SGD"
    steps_per_epoch -- the number of batches of an epoch; default: what Keras knows

    Raises ValueError without `initial_lr`, and when training begins if the number of batches is not known.
    """

    backend: Backend
    model: Any
    params: dict[str, Any]

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("Parameter `initial_lr` is required")
        self.initial_lr = float(initial_lr)
        self.start_epoch, self.end_epoch = start_epoch, end_epoch
        self.momentum_correction, self.steps_per_epoch = momentum_correction, steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.staircase, self.multiplier = staircase, multiplier
        else:
            factor = float(multiplier)
            self.staircase, self.multiplier = True, lambda epoch: factor

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds the number of batches of an epoch, if it is needed."""
        del logs
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = _steps_of(self.params)
            if not self.steps_per_epoch:
                raise ValueError(
                    "Could not autodetect the number of steps per epoch. Please specify the steps_per_epoch parameter "
                    f"to the {type(self).__name__}() or upgrade to the latest version of Keras."
                )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Notes the epoch."""
        del logs
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the rate."""
        del logs
        is_over = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        if self.current_epoch < self.start_epoch or is_over:
            return
        if not self.staircase:
            self._adjust(self.current_epoch + batch / (self.steps_per_epoch or 1))
        elif batch == 0:
            self._adjust(self.current_epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the rate to the metrics, as `lr`."""
        del epoch
        if logs is not None:
            logs["lr"] = learning_rate(self.model.optimizer, self.backend)

    def _adjust(self, epoch: float) -> None:
        write_back(self.model)
        optimizer = self.model.optimizer
        before, after = learning_rate(optimizer, self.backend), self.initial_lr * self.multiplier(epoch)
        optimizer.learning_rate = after
        if self.momentum_correction and before and after != before:
            correct_momentum(optimizer, after / before, self.backend)


def _steps_of(params: dict[str, Any]) -> int | None:
    """The number of batches of an epoch, if Keras knows it; in a session, Keras 2 knows the number of rows instead."""
    steps, samples, batch = (params.get(name) for name in ("steps", "samples", "batch_size"))
    return -(-samples // batch) if not steps and samples and batch else steps


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr` / size to `initial_lr` over the first epochs, batch by batch.

    initial_lr    -- the rate after the warm-up, scaled to the number of ranks
    warmup_epochs -- how many epochs it takes
    verbose       -- above 0, prints the rate after the warm-up
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: float = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            size = world.current().size
            # At the end of each batch, so that the last one of the warm-up has the whole rate.
            epoch += 1.0 / (self.steps_per_epoch or 1)
            return 1.0 / size * (epoch * (size - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,  # type: ignore[arg-type]  # compared only
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Prints the rate after the warm-up."""
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0:
            rate = learning_rate(self.model.optimizer, self.backend)
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {rate:g}.")


class BestModelCheckpoint:
    """Saves the model whenever a metric is better than before. Set `filepath` before training begins."""

    filepath: Any

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks that there is a path. Raises ValueError if there is none."""
        parent: Any = super()
        if not self.filepath or self.filepath == UNSET:
            raise ValueError("BestModelCheckpoint has no filepath; set callback.filepath before fit")
        parent.on_train_begin(logs)


UNSET = "ronde-unset.keras"
"""The path of a checkpoint that has none yet: Keras checks how it ends."""


def checkpoint_arguments(
    monitor: str, verbose: int, save_weights_only: bool, mode: str, save_freq: Any
) -> dict[str, Any]:
    """Returns the arguments of Keras' `ModelCheckpoint` for `BestModelCheckpoint`."""
    return {
        "filepath": UNSET.replace(".keras", ".weights.h5") if save_weights_only else UNSET,
        "monitor": monitor,
        "verbose": verbose,
        "save_best_only": True,
        "save_weights_only": save_weights_only,
        "mode": mode,
        "save_freq": save_freq,
    }


def learning_rate(optimizer: Any, backend: Backend) -> float:
    """Returns the learning rate of an optimizer. Raises ValueError if a schedule of Keras sets it."""
    try:
        return _number(optimizer.learning_rate, backend)
    except TypeError as error:
        raise ValueError("the learning rate of this optimizer is a schedule; give a number") from error


def _number(given: Any, backend: Backend) -> float:
    """Returns a number, or the one in a variable."""
    is_variable = hasattr(given, "numpy") or hasattr(given, "value")
    return float(backend.value_of(given) if is_variable else given)


def correct_momentum(optimizer: Any, ratio: float, backend: Backend) -> None:
    """Scales the momentum of an optimizer by the change of the learning rate.

    Momentum includes the rate with which gradients were added. A larger rate with the momentum of a smaller one slows
    training down, so it is scaled once. Optimizers without momentum stay as they are.
    """
    # A LossScaleOptimizer has no momentum; that inside it has.
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    momentum = getattr(optimizer, "momentum", None)
    if momentum is None or not _number(momentum, backend):
        return
    # There are none before the first step, and then nothing to correct. The older optimizers of Keras 2 have slots.
    of_older = [slots.get("momentum") for slots in getattr(optimizer, "_slots", {}).values()]
    for each in getattr(optimizer, "momentums", None) or of_older:
        if each is not None:
            backend.multiply(each, ratio)
