"""Parts of ronde.tensorflow without a job."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy
import pytest

pytest.importorskip("tensorflow")

import keras
import ronde.keras
import tensorflow as tf
from ronde.elastic.state import ObjectState
from ronde.errors import MismatchError, PeerLostError, RondeError
from ronde.frameworks import world
from ronde.tensorflow import elastic, sync_batch_norm, xla
from ronde.tensorflow.aggregation import GradientAggregation
from ronde.tensorflow.names import name_of


def test_numbered_names_are_those_of_nothing_else() -> None:
    with tf.Graph().as_default():
        found = [name_of("allreduce", None, name) for name in ("a", "a", "a_1", "b_1", "b", "b", "b")]
    assert found == ["a", "a_1", "a_1_1", "b_1", "b", "b_2", "b_3"]


def test_kernels_for_gpus_have_their_arguments_in_main_memory() -> None:
    """They cannot run here. TensorFlow copies what such a kernel reads and writes."""
    from tensorflow.python.framework import kernels

    for name, arguments in [
        ("RondeAllreduce", {"tensor", "reduced"}),
        ("RondeAlltoall", {"tensor", "splits", "received", "received_splits"}),
        ("RondeGroupedAllgather", {"tensors", "gathered"}),
        ("RondeSize", {"value"}),
        ("RondeBarrier", set()),
    ]:
        found = {each.device_type: each for each in kernels.get_registered_kernels_for_op(name).kernel}
        assert set(found) == {"CPU", "GPU"}
        assert set(found["GPU"].host_memory_arg) == arguments


def test_a_state_without_variables_is_refused_when_executing_eagerly() -> None:
    with pytest.raises(ValueError, match="give a list of them"):
        elastic.TensorFlowState(epoch=0)
    assert elastic.TensorFlowState([tf.Variable(1.0)], epoch=0).epoch == 0


@pytest.mark.parametrize("is_scaled", [False, True])
def test_momentum_is_corrected_also_in_a_loss_scale_optimizer(is_scaled: bool) -> None:
    variable, sgd = keras.Variable([1.0]), keras.optimizers.SGD(0.1, momentum=0.9)
    model = mock.Mock(optimizer=keras.mixed_precision.LossScaleOptimizer(sgd) if is_scaled else sgd, spec=["optimizer"])
    sgd.build([variable])
    sgd.momentums[0].assign([3.0])
    schedule = ronde.keras.callbacks.LearningRateScheduleCallback(0.2, multiplier=1.0)
    schedule.set_model(model)
    schedule.on_train_batch_begin(0)
    numpy.testing.assert_allclose(sgd.momentums[0].numpy(), [6.0], rtol=1e-6)
    assert float(sgd.learning_rate) == numpy.float32(0.2)


class Lost(ObjectState):
    """A state whose synchronization fails, as a broadcast of TensorFlow does when a rank is lost."""

    def __init__(self) -> None:
        super().__init__(lambda value: value, lambda: 0)

    def sync(self) -> None:
        raise tf.errors.AbortedError(None, None, "rank 1 was lost [Op:RondeBroadcastMany]")


def test_a_loss_while_the_state_is_synchronized_is_a_failure_of_a_collective() -> None:
    with pytest.raises(PeerLostError, match="rank 1 was lost"):
        elastic.run(lambda state: None)(Lost())


def test_ranks_that_disagree_are_a_mismatch_with_horovods_codes_too() -> None:
    text = "Mismatched data types: One rank had type float32, but another rank had type int32. [Op:RondeAllreduce]"
    for kind in (tf.errors.InvalidArgumentError, tf.errors.FailedPreconditionError):
        assert type(elastic.failure_of(kind(None, None, text))) is MismatchError
    uninitialized = "Horovod has not been initialized; use hvd.init(). [Op:RondeAllreduce]"
    assert type(elastic.failure_of(tf.errors.FailedPreconditionError(None, None, uninitialized))) is RondeError


class Bindings:
    """A fake of the world, its client, and the extension module that compiled functions use."""

    def __init__(self) -> None:
        self.client, self.native_session, self.bound = self, object(), []  # type: ignore[var-annotated]
        self.replay: object | None = None

    def is_begun(self) -> bool:
        return True

    def current(self) -> Bindings:
        return self

    def xla_bind(self, session: object) -> None:
        self.bound.append(session)


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    made = Bindings()
    monkeypatch.setattr(xla, "world", made)
    monkeypatch.setattr(xla, "_ronde", made)
    monkeypatch.setattr(xla._State, "has_passed", True)
    monkeypatch.setattr(xla._State, "session", None)
    return made


def test_compiled_functions_use_each_session_of_a_client(bindings: Bindings) -> None:
    first = bindings.native_session
    xla.follow()
    xla.follow()
    bindings.native_session = object()
    xla.follow()
    assert bindings.bound == [first, bindings.native_session]


def test_compiled_functions_refuse_a_session_that_may_be_replaced(bindings: Bindings) -> None:
    bindings.replay = object()
    xla.follow()
    with tf.Graph().as_default(), pytest.raises(NotImplementedError, match='on_failure="continue" is for'):
        xla.allreduce([tf.zeros(1)], "name", 0, "1", "1", 0)
    assert not bindings.bound


def test_names_in_compiled_functions_are_ascii() -> None:
    """A byte such as 0xC3 is a letter by itself, but only a part of one in UTF-8."""
    assert xla._literal("größe.1") == r'"gr\C3\B6\C3\9Fe\2E1"'


def test_batches_of_more_than_two_to_the_31_elements_are_counted() -> None:
    shape, means = tf.constant([1 << 16, 1 << 16, 8], tf.int64), tf.constant(8, tf.int64)
    assert int(sync_batch_norm.elements_of_each(shape, means)) == 1 << 32
    assert int(sync_batch_norm.elements_of_each(tf.constant([0, 8], tf.int64), means)) == 0


class Applied:
    """What an aggregation applies."""

    def __init__(self, count: int = 2) -> None:
        self.steps: list[list[float | None]] = []
        self.variables = [tf.Variable(0.0) for _ in range(count)]
        self.aggregation = GradientAggregation(2, average=False, sparse_as_dense=False)

    def add(self, *gradients: float | None) -> Any:
        given = [None if each is None else tf.constant(each) for each in gradients]

        def apply(sums: list[Any]) -> None:
            self.steps.append([None if each is None else float(each) for each in sums])

        return self.aggregation.run(given, self.variables, lambda sums: sums, apply, lambda: None)


def test_passes_without_some_gradients_add_what_there_is() -> None:
    applied = Applied()
    for gradients in [(1.0, None), (None, 2.0), (None, 1.0), (None, 3.0), (5.0, 5.0), (1.0, None)]:
        applied.add(*gradients)
    assert applied.steps == [[1.0, 2.0], [None, 4.0], [6.0, 5.0]]


def test_sums_do_not_outlive_their_session() -> None:
    applied = Applied(1)
    applied.add(100.0)
    world.changed()  # as at the end of a session
    applied.add(1.0)
    assert not applied.steps
    applied.add(2.0)
    assert applied.steps == [[3.0]]


@pytest.mark.parametrize("in_graph", [False, True])
def test_steps_go_on_after_a_reduction_that_fails(in_graph: bool) -> None:
    """The sums of the failed step are lost, and the next pass is the first one of a step."""
    variable, outcomes = tf.Variable(0.0), iter([RuntimeError("it fails"), None, None])
    aggregation = GradientAggregation(2, average=False, sparse_as_dense=False)

    def fail_first() -> Any:
        if error := next(outcomes):
            raise error
        return numpy.float32(0)

    def reduce(sums: list[Any]) -> list[Any]:
        zero = tf.numpy_function(fail_first, [], tf.float32) if in_graph else fail_first()
        return [each + zero for each in sums]

    def add(gradient: Any) -> None:
        aggregation.run([gradient], [variable], reduce, lambda sums: variable.assign_add(sums[0]), tf.no_op)

    run, failed = tf.function(add) if in_graph else add, []
    for index, gradient in enumerate([100.0, 100.0, 1.0, 2.0, 3.0, 4.0]):
        try:
            run(tf.constant(gradient))
        except (RuntimeError, tf.errors.OpError):
            failed.append(index)
    assert failed == [1]
    assert variable.numpy() == 10.0


def test_graphs_refuse_gradients_of_other_variables() -> None:
    variables = [tf.Variable(0.0, name="one"), tf.Variable(0.0, name="other")]
    aggregation = GradientAggregation(2, average=False, sparse_as_dense=False)

    @tf.function
    def add(has_other: bool) -> None:
        gradients = [tf.constant(1.0), tf.constant(1.0) if has_other else None]
        aggregation.run(gradients, variables, lambda sums: sums, lambda sums: None, lambda: None)

    add(False)
    with pytest.raises(ValueError, match=r"lack those of other:0\. Let each pass"):
        add(True)
    add(False)
    with pytest.raises(ValueError, match="the same variables in the same order"):
        aggregation.run([tf.constant(1.0)], variables[:1], list, print, print)
