"""Adds the gradients of several passes on each rank before they are reduced (`backward_passes_per_step`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import tensorflow as tf

from ronde.tensorflow.reduction import reference

if TYPE_CHECKING:
    from collections.abc import Sequence

Reduce = Callable[[list[Any]], list[Any]]
Apply = Callable[[list[Any]], Any]


def check_passes(passes: int) -> None:
    """Raises ValueError unless this is a number of passes from 1."""
    if not isinstance(passes, int) or isinstance(passes, bool) or passes <= 0:
        raise ValueError(f"backward_passes_per_step must be > 0, as an integer; not {passes!r}")


class GradientAggregation:
    """The sums of the gradients of some passes.

    passes  -- how many passes are added before a step
    average -- whether the sum is divided by the number of passes
    sparse_as_dense -- whether `tf.IndexedSlices` are converted to tensors
    """

    def __init__(self, passes: int, average: bool, sparse_as_dense: bool) -> None:
        check_passes(passes)
        self.passes, self.average, self.sparse_as_dense = passes, average, sparse_as_dense
        self._counter: Any = None
        self._sums: list[Any] = []

    def run(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        reduce: Reduce,
        apply: Apply,
        skip: Callable[[], Any],
    ) -> Any:
        """Adds gradients. With the last pass of a step, reduces and applies the sums; otherwise calls `skip`.

        Returns what `apply` does if each pass is a step; otherwise the operation in a graph of TensorFlow 1, else None.
        Raises ValueError for `tf.IndexedSlices` that are not converted.
        """
        if self.passes == 1:
            return apply(reduce(list(gradients)))
        dense = [self._dense(each) for each in gradients]
        self._create(dense, variables)
        present = [index for index, each in enumerate(dense) if each is not None]

        def step() -> Any:
            sums: list[Any] = [None] * len(dense)
            for index in present:
                value = self._sums[index].read_value()
                sums[index] = value / tf.cast(self.passes, value.dtype) if self.average else value
            with tf.control_dependencies(_operations([apply(reduce(sums))])):
                cleared = [self._sums[index].assign(tf.zeros_like(self._sums[index])) for index in present]
                return _done([*cleared, self._counter.assign(0)])

        added = [self._sums[index].assign_add(dense[index]) for index in present]
        with tf.control_dependencies(_operations([*added, self._counter.assign_add(1)])):
            is_last = tf.equal(self._counter.read_value(), self.passes)
            if tf.executing_eagerly():
                return step() if bool(is_last) else _done([skip()])
            return tf.cond(is_last, step, lambda: _done([skip()]))

    def _dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self.sparse_as_dense:
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False"
            )
        return tf.convert_to_tensor(gradient)

    def _create(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        if self._counter is not None:
            return
        with tf.init_scope():
            self._counter = _variable(tf.zeros([], tf.int32))
            for gradient, variable in zip(gradients, variables):
                # A gradient in a graph may have an unknown shape; that of its variable is known.
                shape = reference(variable).shape
                self._sums.append(None if gradient is None else _variable(tf.zeros(shape, gradient.dtype)))


def _variable(value: Any) -> Any:
    if tf.executing_eagerly():
        return tf.Variable(value, trainable=False)
    return tf.compat.v1.get_variable(
        f"ronde_aggregation_{len(tf.compat.v1.global_variables())}",
        initializer=value,
        trainable=False,
        use_resource=True,
        collections=[tf.compat.v1.GraphKeys.GLOBAL_VARIABLES],
    )


def _operations(results: list[Any]) -> list[Any]:
    """What others can wait for: nothing when executing eagerly.

    A graph of TensorFlow 1 has no automatic control dependencies, nor has a branch in it.
    """
    if tf.executing_eagerly():
        return []
    operations = [each if isinstance(each, (tf.Tensor, tf.Operation)) else getattr(each, "op", None) for each in results]
    return [each for each in operations if each is not None]


def _done(results: list[Any]) -> Any:
    """The result of a branch: that its operations are done."""
    with tf.control_dependencies(_operations(results)):
        return tf.constant(True)
