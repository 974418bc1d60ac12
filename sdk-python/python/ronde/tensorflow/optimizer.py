"""`DistributedOptimizer` for optimizers of TensorFlow 1 (`tf.compat.v1.train`) and of Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from ronde.frameworks.process_sets import ProcessSet, global_process_set
from ronde.ops import Adasum, Average
from ronde.tensorflow import mpi_ops
from ronde.tensorflow.aggregation import GradientAggregation, check_passes
from ronde.tensorflow.compression import Compression, Compressor
from ronde.tensorflow.reduction import Options, needs_collectives, reduce_gradients


def DistributedOptimizer(  # noqa: N802 -- Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Returns an optimizer that reduces gradients over all ranks before it applies them.

    optimizer -- of `tf.compat.v1.train`, of Keras 3 or of tf-keras
    name, use_locking -- of the new optimizer; for TensorFlow 1
    backward_passes_per_step -- how many passes are added on each rank before a reduction
    average_aggregated_gradients -- whether their sum is divided by that number
    op        -- Average or Sum; Adasum for TensorFlow 1, which then reduces the changes of the variables

    The other arguments are those of `DistributedGradientTape`. Raises ValueError for options that exclude each other
    and for anything that is no optimizer.
    """
    options = Options(
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        prefix="DistributedOptimizer",
    )
    check_passes(backward_passes_per_step)
    if op == Adasum and (groups is not None or num_groups):
        raise ValueError("Adasum reduces each variable by itself: give no groups or num_groups")
    if op == Adasum and average_aggregated_gradients:
        raise ValueError("Adasum does not support average_aggregated_gradients == True")
    if not isinstance(optimizer, tf.compat.v1.train.Optimizer):
        from ronde.tensorflow.keras.optimizer import wrap

        return wrap(optimizer, name, options, backward_passes_per_step, average_aggregated_gradients)
    if tf.executing_eagerly() and backward_passes_per_step > 1:
        raise ValueError(
            "backward_passes_per_step > 1 is not supported for optimizers of TensorFlow 1 when executing eagerly; use "
            "one of tf.keras"
        )
    kind = _AdasumOptimizer if op == Adasum else _DistributedOptimizer
    aggregation = GradientAggregation(backward_passes_per_step, average_aggregated_gradients, sparse_as_dense)
    return kind(optimizer, name, use_locking, options, aggregation)


class _DistributedOptimizer(tf.compat.v1.train.Optimizer):
    """An optimizer of TensorFlow 1 whose `compute_gradients` reduces."""

    def __init__(
        self, optimizer: Any, name: str | None, use_locking: bool, options: Options, aggregation: GradientAggregation
    ) -> None:
        super().__init__(name=name or f"Distributed{type(optimizer).__name__}", use_locking=use_locking)
        self._optimizer, self._ronde_options, self._aggregation = optimizer, options, aggregation

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Returns pairs of a gradient, reduced over all ranks, and its variable.

        With several passes per step gradients are reduced when they are applied.
        """
        pairs = self._optimizer.compute_gradients(*args, **kwargs)
        if self._aggregation.passes > 1 or not pairs:
            return pairs
        gradients, variables = zip(*pairs)
        return list(zip(self._reduced(list(gradients), variables), variables))

    def _reduced(self, gradients: list[Any], variables: Any) -> list[Any]:
        return reduce_gradients(gradients, variables, self._ronde_options)

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Applies gradients as the wrapped optimizer does."""
        pairs = list(grads_and_vars)
        if self._aggregation.passes == 1:
            return self._apply(pairs, global_step, name)
        gradients, variables = zip(*pairs)

        def apply(reduced: list[Any]) -> Any:
            return self._apply(list(zip(reduced, variables)), global_step, name)

        self._optimizer._create_slots([variable for gradient, variable in pairs if gradient is not None])
        return self._aggregation.run(
            list(gradients), variables, lambda sums: self._reduced(sums, variables), apply, tf.no_op
        )

    def _apply(self, pairs: list[Any], global_step: Any, name: str | None) -> Any:
        return self._optimizer.apply_gradients(pairs, global_step, name)

    def register_local_var(self, variable: Any) -> None:
        """Leaves the gradient of a variable as it is on this rank, or divides it by the number of ranks."""
        self._ronde_options.register_local(variable)

    def get_slot(self, *args: Any, **kwargs: Any) -> Any:
        """Returns a slot of the wrapped optimizer."""
        return self._optimizer.get_slot(*args, **kwargs)

    def get_slot_names(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the names of the wrapped optimizer's slots."""
        return self._optimizer.get_slot_names(*args, **kwargs)

    def variables(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the variables of the wrapped optimizer."""
        return self._optimizer.variables(*args, **kwargs)


class _AdasumOptimizer(_DistributedOptimizer):
    """Applies gradients on each rank, and combines the changes of the variables by Adasum."""

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Returns this rank's gradients with their variables."""
        return self._optimizer.compute_gradients(*args, **kwargs)

    def _reduced(self, gradients: list[Any], variables: Any) -> list[Any]:
        del variables
        return gradients

    def _apply(self, pairs: list[Any], global_step: Any, name: str | None) -> Any:
        """Applies the Adasum of what each rank's gradients change. A rank outside of the set applies its own.

        So are the changes of local variables.
        """
        if not needs_collectives(self._ronde_options.process_set):
            return super()._apply(pairs, global_step, name)
        pairs = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
        # Copies: what is read of a reference variable is its memory, which the optimizer changes in place.
        before = [tf.raw_ops.DeepCopy(x=variable.read_value()) for _, variable in pairs]
        with tf.control_dependencies(before):
            applied = super()._apply(pairs, global_step, name)
        options = self._ronde_options
        shared = [(each, start) for (_, each), start in zip(pairs, before) if not options.is_local(each)]
        with tf.control_dependencies([] if applied is None else [applied]):
            changes = [variable.read_value() - start for variable, start in shared]
            combined = [
                mpi_ops.allreduce(
                    change,
                    op=Adasum,
                    name=f"DistributedOptimizer.change.{index}",
                    compression=options.compression,
                    device_dense=options.device_dense,
                    process_set=options.process_set,
                )
                for index, change in enumerate(changes)
            ]
            assigned = [variable.assign(start + change) for (variable, start), change in zip(shared, combined)]
            return tf.group(*assigned)
