"""Broadcasts of variables and objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import tensorflow as tf

from ronde.frameworks import objects, world
from ronde.frameworks.process_sets import ProcessSet, exchanged, global_process_set, members_of
from ronde.tensorflow import mpi_ops
from ronde.tensorflow.reduction import reference

if TYPE_CHECKING:
    from collections.abc import Iterable

# Variables that are broadcast at once hold that many bytes in shared memory, or one of them more.
_WINDOW_BYTES = 64 << 20


def broadcast_variables(
    variables: Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Assigns the values of rank `root_rank` to variables, those of Keras too. All ranks must give the same list.

    variables -- such as `model.variables`, of the same types and shapes in the same order on all ranks
    inplace   -- accepted for Horovod's programs: the result is the same

    In a graph of TensorFlow 1, returns the operation that assigns; else it assigns at once. Raises ValueError on all
    ranks when lists differ, and for a root that is not in the process set.
    """
    del inplace
    listed = [reference(each) for each in variables]
    mpi_ops.set_number(process_set)  # raises before anything is exchanged
    if not tf.inside_function():
        check_alike(listed, process_set)
    if tf.executing_eagerly():
        _assign_eagerly(listed, root_rank, process_set)
        return None
    operations = assigned(listed, root_rank, "broadcast_variables", process_set)
    # A `tf.function` runs assignments that nothing depends on, and returns no operations.
    return None if tf.inside_function() else tf.group(*operations)


def assigned(variables: list[Any], root_rank: int, name: str, process_set: ProcessSet) -> list[Any]:
    """Returns the assignments of a graph."""
    received = [
        mpi_ops.broadcast(_sendable(each.read_value()), root_rank, f"{name}.{index}", process_set=process_set)
        for index, each in enumerate(variables)
    ]
    return [variable.assign(_restored(value, variable.dtype)) for variable, value in zip(variables, received)]


_BITS_OF = {1: tf.uint8, 2: tf.uint16, 4: tf.int32, 8: tf.int64, 16: tf.int64}
_NOT_SENT = (tf.uint32, tf.uint64, tf.complex64, tf.complex128)


def _sendable(value: Any) -> Any:
    """Returns a value of a type that operations accept: the bits of others, such as the states of random generators."""
    is_small_float = value.dtype.is_floating and value.dtype.size == 1
    return tf.bitcast(value, _BITS_OF[value.dtype.size]) if value.dtype in _NOT_SENT or is_small_float else value


def _restored(value: Any, dtype: Any) -> Any:
    return value if value.dtype == dtype.base_dtype else tf.bitcast(value, dtype.base_dtype)


def broadcast_(
    variables: Iterable[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Assigns the values of rank `root_rank` to variables, and returns them. As `broadcast_variables`.

    name -- the beginning of the operations' names

    Raises ValueError if some are variables of TensorFlow 1 and others are resource variables.
    """
    listed = [reference(each) for each in variables]
    kinds = {isinstance(each, tf.Variable) and hasattr(each, "handle") for each in listed}
    if len(kinds) > 1:
        raise ValueError("All variables passed to broadcast_() should be of the same kind, resource or reference")
    if tf.executing_eagerly():
        broadcast_variables(listed, root_rank, process_set)
        return listed
    return assigned(listed, root_rank, name or "broadcast_", process_set)


def check_alike(variables: list[Any], process_set: ProcessSet) -> None:
    """Raises ValueError on all ranks if one has another list, so that no rank waits for it."""
    mine = [[each.dtype.base_dtype.name, str(each.shape)] for each in variables]
    members = members_of(process_set)
    everybodys = exchanged(world.current().client, mine, "tensorflow.variables", members)
    ranks = process_set.ranks or range(len(everybodys))
    for rank, other in zip(ranks, everybodys):
        if other == everybodys[0]:
            continue
        if len(other) != len(everybodys[0]):
            what = f"{len(other)} variables, and rank {ranks[0]} has {len(everybodys[0])}"
        else:
            index = next(index for index, each in enumerate(other) if each != everybodys[0][index])
            (dtype, shape), (first_dtype, first_shape) = other[index], everybodys[0][index]
            what = (
                f"{dtype} of shape {shape} as variable {index}, and rank {ranks[0]} has {first_dtype} of shape "
                f"{first_shape}"
            )
        raise ValueError(
            f"broadcast_variables: rank {rank} has {what}. Give the same variables on all ranks, once the "
            "model is built"
        )


def _assign_eagerly(variables: list[Any], root_rank: int, process_set: ProcessSet) -> None:
    window: list[Any] = []
    nbytes = 0
    for variable in [*variables, None]:
        size = 0 if variable is None else variable.dtype.size * (variable.shape.num_elements() or 0)
        if window and (variable is None or nbytes + size > _WINDOW_BYTES):
            values = [_sendable(each.read_value()) for each in window]
            received = mpi_ops.broadcast_many(values, root_rank, "", process_set)
            for each, value in zip(window, received):
                each.assign(_restored(value, each.dtype))
            window, nbytes = [], 0
        if variable is not None:
            window.append(variable)
            nbytes += size


def broadcast_global_variables(root_rank: int) -> Any:
    """Returns the operation that assigns rank `root_rank`'s values to all variables of a graph of TensorFlow 1.

    Raises RuntimeError when executing eagerly: then there is no collection of all variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "hvd.broadcast_global_variables() does not support eager execution. "
            "Please use `hvd.broadcast_variables(<model/optimizer variables>)` instead."
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Broadcasts all variables of rank `root_rank` when a session of TensorFlow 1 begins, including after a restore.

    device -- the device for the operations
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.bcast_op: Any = None

    def begin(self) -> None:
        """Adds the operation to the graph."""
        if self.bcast_op is None or self.bcast_op.graph is not tf.compat.v1.get_default_graph():
            with mpi_ops.device(self.device):
                self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs the operation."""
        del coord
        session.run(self.bcast_op)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Broadcasts the object of rank `root_rank`, which is pickled. Returns a copy on the other ranks.

    session -- accepted for Horovod's programs: objects do not go through the graph
    """
    del session
    return objects.broadcast_object(obj, root_rank, name or "tensorflow.object", process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Returns a function of an object that does what `broadcast_object` does."""

    def function(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return function


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Returns all ranks' objects, which are pickled, in rank order. `session` as in `broadcast_object`."""
    del session
    return objects.allgather_object(obj, name or "tensorflow.object", process_set)
