"""Adds the gradients of several passes on each rank before they are reduced (`backward_passes_per_step`)."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Callable

import tensorflow as tf

from ronde.frameworks import world
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

    They are zero again in each session, as a restart continues from a commit, and new workers have no sums. In a graph
    of TensorFlow 1 they are global variables, and a new session leaves them as they are.
    """

    def __init__(self, passes: int, average: bool, sparse_as_dense: bool) -> None:
        check_passes(passes)
        self.passes, self.average, self.sparse_as_dense = passes, average, sparse_as_dense
        self._counter: Any = None
        self._variables: list[Any] = []
        self._sums: dict[int, Any] = {}
        # Which variables have a gradient: in graphs, where all passes have the same, and eagerly since the last step.
        self._traced: set[int] | None = None
        self._added: set[int] = set()
        if passes > 1:
            _aggregations.add(self)

    def run(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        reduce: Reduce,
        apply: Apply,
        skip: Callable[[], Any],
    ) -> Any:
        """Adds gradients. With the last pass of a step, reduces and applies the sums; otherwise calls `skip`.

        A variable has no gradient in a step if it had none in all of its passes. Returns what `apply` does if each pass
        is a step; otherwise the operation in a graph of TensorFlow 1, else None. Raises ValueError for
        `tf.IndexedSlices` that are not converted, for other variables than in the first pass, and if graphs have
        gradients of others. What `reduce` and `apply` raise loses the sums of that step.
        """
        if self.passes == 1:
            return apply(reduce(list(gradients)))
        dense = [self._dense(each) for each in gradients]
        present = [index for index, each in enumerate(dense) if each is not None]
        self._check(present, variables)
        self._create(dense, variables)
        added = [self._sums[index].assign_add(dense[index]) for index in present]
        with tf.control_dependencies(_operations([*added, self._counter.assign_add(1)])):
            # A graph that fails between the count and the step leaves a number that a later pass exceeds.
            is_last = tf.greater_equal(self._counter.read_value(), self.passes)
            if tf.executing_eagerly():
                self._added.update(present)
                return self._step(len(dense), reduce, apply) if bool(is_last) else _done([skip()])
            return tf.cond(is_last, lambda: self._step(len(dense), reduce, apply), lambda: _done([skip()]))

    def _step(self, count: int, reduce: Reduce, apply: Apply) -> Any:
        """Begins again, and reduces and applies the sums.

        In this order: after a reduction that fails, the next pass is the first one of a step.
        """
        indices = sorted(self._added if self._traced is None else self._traced)
        values = [self._sums[index].read_value() for index in indices]
        with tf.control_dependencies(_operations(values)):
            cleared = [self._sums[index].assign(tf.zeros_like(self._sums[index])) for index in indices]
            begun = [*cleared, self._counter.assign(0)]
        if tf.executing_eagerly():
            self._added.clear()
        with tf.control_dependencies(_operations(begun)):
            sums: list[Any] = [None] * count
            for index, value in zip(indices, values):
                sums[index] = value / tf.cast(self.passes, value.dtype) if self.average else value
            return _done([*begun, apply(reduce(sums))])

    def _check(self, present: list[int], variables: Sequence[Any]) -> None:
        """Raises ValueError if sums would mix gradients of different variables, or be lost."""
        known = [reference(each) for each in variables]
        self._variables = self._variables or known
        if len(known) != len(self._variables) or any(one is not other for one, other in zip(known, self._variables)):
            raise ValueError(
                "with backward_passes_per_step > 1, all passes have the same variables in the same order; use an "
                "optimizer for each list of variables"
            )
        if self._traced is None and not tf.executing_eagerly():
            self._traced = set(present)
        if self._traced is not None and self._traced != self._added | set(present):
            odd = sorted(self._traced ^ (self._added | set(present)))
            names = ", ".join(str(getattr(self._variables[index], "name", index)) for index in odd)
            raise ValueError(
                "with backward_passes_per_step > 1 in graphs, all passes have gradients of the same variables; some of "
                f"them lack those of {names}. Let each pass use these variables, or give them to another optimizer"
            )

    def reset(self) -> None:
        """Begins again, as the session has ended."""
        if self._counter is None or tf.is_symbolic_tensor(self._counter.handle):
            return
        self._added.clear()
        with tf.init_scope():
            for each in (self._counter, *self._sums.values()):
                each.assign(tf.zeros_like(each))

    def _dense(self, gradient: Any) -> Any:
        if not isinstance(gradient, tf.IndexedSlices):
            return gradient
        if not self.sparse_as_dense:
            raise ValueError(
                "IndexedSlices are not supported when `backward_passes_per_step` > 1 and `sparse_as_dense` is False"
            )
        return tf.convert_to_tensor(gradient)

    def _create(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        with tf.init_scope():
            if self._counter is None:
                self._counter = _variable(tf.zeros([], tf.int32))
            for index, (gradient, variable) in enumerate(zip(gradients, variables)):
                if gradient is not None and index not in self._sums:
                    # A gradient in a graph may have an unknown shape; that of its variable is known.
                    self._sums[index] = _variable(tf.zeros(reference(variable).shape, gradient.dtype))


_aggregations: weakref.WeakSet[GradientAggregation] = weakref.WeakSet()


def _reset_all() -> None:
    if world.is_begun():
        return
    for each in list(_aggregations):
        each.reset()


world.on_change(_reset_all)


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
    operations = [
        each if isinstance(each, (tf.Tensor, tf.Operation)) else getattr(each, "op", None) for each in results
    ]
    return [each for each in operations if each is not None]


def _done(results: list[Any]) -> Any:
    """The result of a branch: that its operations are done."""
    with tf.control_dependencies(_operations(results)):
        return tf.constant(True)
