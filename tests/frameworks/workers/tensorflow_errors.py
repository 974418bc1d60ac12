"""Bad input of ronde.tensorflow: all ranks get the same words, and the next step works."""

from __future__ import annotations

import importlib
import re
from typing import Any, Callable

import numpy as np
import ronde.tensorflow as hvd
import tensorflow as tf

tf.get_logger().setLevel("ERROR")
traced_early = tf.function(lambda tensor: hvd.allreduce(tensor, name="early"))


def fails(kind: type[Exception], call: Callable[[], Any]) -> str:
    """The text of the error that a call raises, without what TensorFlow adds of the node."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__} was raised")


def agreed(text: str, words: str) -> None:
    """Checks that all ranks got the same words of ronde, and that the next step works."""
    found = re.search(words, text)
    assert found, text
    everybodys = hvd.allgather_object(found.group(0))
    assert len(set(everybodys)) == 1, everybodys
    np.testing.assert_array_equal(hvd.allreduce(tf.ones(2), op=hvd.Sum, name="next"), [hvd.size()] * 2)


def before_init() -> None:
    for call in (lambda: hvd.allreduce(tf.ones(1)), lambda: traced_early(tf.ones(1)), hvd.rank):
        assert "has not been initialized; use hvd.init()" in fails(ValueError, call)
    assert "has not been initialized" in fails(tf.errors.FailedPreconditionError, hvd.rank_op)
    assert int(hvd.process_set_included_op()) == -1


def mismatches() -> None:
    rank = hvd.rank()
    for run in (lambda function: function, tf.function):
        kind = tf.errors.InvalidArgumentError
        text = fails(kind, lambda run=run: run(lambda: hvd.allreduce(tf.ones(rank + 1), name="shapes"))())
        agreed(text, r"Mismatched ALLREDUCE tensor shapes.*?\(rank 0: .*?\)")
        assert "[RONDE-E306]" in text, text
        mine = tf.ones(2, [tf.float32, tf.float64][rank % 2])
        text = fails(kind, lambda run=run, mine=mine: run(lambda: hvd.allreduce(mine, name="types"))())
        agreed(text, r"Mismatched data types.*?\)")
        text = fails(kind, lambda run=run: run(lambda: hvd.broadcast(tf.ones(2), rank, name="roots"))())
        agreed(text, r"Mismatched.*? root.*?\)")
        text = fails(kind, lambda run=run: run(lambda: hvd.allgather(tf.ones([2, rank + 1]), name="rows"))())
        agreed(text, r"Mismatched ALLGATHER.*?\)")
        text = fails(kind, lambda run=run: run(lambda: hvd.allreduce(tf.ones(2), op=rank % 2, name="ops"))())
        agreed(text, r"Mismatched.*?\)")
    in_a_step()


def mismatches_for_horovod() -> None:
    """Programs that import Horovod's module get Horovod's type of error, with the same words."""
    importlib.import_module("horovod.tensorflow")
    text = fails(tf.errors.FailedPreconditionError, lambda: hvd.allreduce(tf.ones(hvd.rank() + 1), name="shapes"))
    agreed(text, r"Mismatched ALLREDUCE tensor shapes.*?\(rank 0: .*?\)")


def in_a_step() -> None:
    """One of thirty operations in flight fails. The others complete, and so does the next step."""

    @tf.function
    def step(length: Any) -> Any:
        found = [hvd.allreduce(tf.fill([10], float(index)), name=f"step.{index}") for index in range(30)]
        return tf.add_n(found), hvd.allreduce(tf.ones([length]), name="step.bad")

    text = fails(tf.errors.InvalidArgumentError, lambda: step(tf.constant(hvd.rank() + 1)))
    agreed(text, r"Mismatched ALLREDUCE tensor shapes.*?\)")
    np.testing.assert_array_equal(step(tf.constant(3))[0], np.full(10, sum(range(30))))


def arguments() -> None:
    for wrong in (tf.constant(["text"]), tf.constant([1j]), tf.constant([1], tf.uint32)):
        fails((TypeError, tf.errors.InvalidArgumentError), lambda wrong=wrong: hvd.allreduce(wrong))
    assert "op is 17" in fails(ValueError, lambda: hvd.allreduce(tf.ones(1), op=17))
    assert "supersedes average" in fails(ValueError, lambda: hvd.allreduce(tf.ones(1), average=True, op=hvd.Sum))
    assert "invalid root rank 99" in fails(ValueError, lambda: hvd.broadcast(tf.ones(1), 99))
    assert "has not been registered" in fails(ValueError, lambda: hvd.allreduce(1.0, process_set=hvd.ProcessSet([0])))
    assert "does not exist" in fails(tf.errors.InvalidArgumentError, lambda: hvd.size_op(77))
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    fails(NotImplementedError, lambda: hvd.allreduce(slices, op=hvd.Max))
    fails(NotImplementedError, lambda: hvd.allreduce(slices, prescale_factor=2.0))
    fails((ValueError, tf.errors.InvalidArgumentError), lambda: hvd.allgather(tf.constant(1.0)))
    traced = tf.function(hvd.reducescatter)
    fails((ValueError, tf.errors.InvalidArgumentError), lambda: traced(tf.constant(1.0)))
    for splits in ([-1] * hvd.size(), [100] * hvd.size(), [[1] * hvd.size()], [1] * (hvd.size() + 1)):
        fails(tf.errors.InvalidArgumentError, lambda splits=splits: hvd.alltoall(tf.ones(hvd.size()), splits))
    fails(tf.errors.InvalidArgumentError, lambda: hvd.alltoall(tf.ones(hvd.size() + 1)))
    fails(RuntimeError, lambda: hvd.broadcast_global_variables(0))
    agreed("fine", "fine")


def variables() -> None:
    """A list that differs between ranks: all of them get the words, and nobody waits."""
    mine = [tf.Variable(tf.ones([2])) for _ in range(hvd.rank() + 1)]
    agreed(fails(ValueError, lambda: hvd.broadcast_variables(mine, 0)), r"rank 1 has 2 variables, and rank 0 has 1")
    mine = [tf.Variable(1.0), tf.Variable(tf.ones([hvd.rank() + 2]))]
    agreed(
        fails(ValueError, lambda: hvd.broadcast_variables(mine, 0)), r"rank 1 has float32 of shape \(3,\) as variable 1"
    )


def eager_with_graph() -> None:
    """Rank 0 runs eagerly what the others run in a graph, under one name."""

    def reduce(tensor: Any) -> Any:
        return hvd.allreduce(tensor, op=hvd.Sum, name="mixed")

    for _ in range(2):
        found = (reduce if hvd.rank() == 0 else tf.function(reduce))(tf.constant([hvd.rank() + 1.0]))
        np.testing.assert_array_equal(found, [sum(range(1, hvd.size() + 1))])


def after_shutdown() -> None:
    traced = tf.function(lambda tensor: hvd.allreduce(tensor, op=hvd.Sum, name="again"))
    traced(tf.ones(1))
    hvd.shutdown()
    assert "use hvd.init()" in fails(tf.errors.FailedPreconditionError, lambda: traced(tf.ones(1)))
    hvd.init()
    np.testing.assert_array_equal(traced(tf.ones(1)), [hvd.size()])


def versions() -> None:
    from ronde.tensorflow import native

    for version in ("1.15.0", "2.15.1", "2"):
        text = fails(ImportError, lambda version=version: native.check_version(version))
        assert "2.21" in text, text
        assert version in text, text
    native.check_version("2.22.0-dev20260101")


before_init()
hvd.init()
for part in (mismatches, arguments, variables, eager_with_graph, after_shutdown, versions, mismatches_for_horovod):
    part()
print(f"rank {hvd.rank()}: all errors are right", flush=True)
