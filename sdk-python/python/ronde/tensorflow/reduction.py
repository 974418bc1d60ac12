"""The reduction of a list of gradients, for tapes and optimizers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from ronde.elastic.membership import is_elastic
from ronde.frameworks.process_sets import ProcessSet, global_process_set, members_of, size_of
from ronde.ops import Adasum, Average, Sum
from ronde.tensorflow import mpi_ops, xla
from ronde.tensorflow.compression import Compression, Compressor
from ronde.tensorflow.native import ops

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Options:
    """How gradients are reduced. Raises ValueError and NotImplementedError for options that exclude each other.

    num_groups -- the number of groups of equal length that gradients are reduced in; 0 for none
    groups     -- lists of variables, each of which is reduced as a group; or None
    scale_local_gradients -- whether gradients that are not reduced are divided by the number of ranks
    """

    device_dense: str = ""
    device_sparse: str = ""
    compression: type[Compressor] = Compression.none
    sparse_as_dense: bool = False
    op: int = Average
    gradient_predivide_factor: float = 1.0
    num_groups: int = 0
    groups: Any = None
    process_set: ProcessSet = global_process_set
    scale_local_gradients: bool = True
    prefix: str = "gradient"
    local: list[Any] = field(default_factory=list)
    """Variables whose gradients are not reduced."""

    def __post_init__(self) -> None:
        if self.op not in (Average, Sum, Adasum):
            raise ValueError(f"gradients are reduced by op=Average, Sum or Adasum, not {self.op!r}")
        if self.gradient_predivide_factor != 1.0 and self.op != Average:
            raise ValueError("gradient_predivide_factor not supported with op != Average")
        if self.num_groups:
            if not isinstance(self.num_groups, int) or self.num_groups < 0:
                raise ValueError(f"num_groups is {self.num_groups!r}; give a number from 0")
            if self.groups is not None:
                raise ValueError("give num_groups or groups, not both")
            self.groups = self.num_groups
        if self.groups is not None:
            _check_groups(self.groups)

    def register_local(self, variable: Any) -> None:
        """Leaves a variable's gradient as it is on each rank."""
        if not any(reference(known) is reference(variable) for known in self.local):
            self.local.append(variable)

    def is_local(self, variable: Any) -> bool:
        """Whether a variable's gradient is not reduced."""
        return any(reference(known) is reference(variable) for known in self.local)


def _check_groups(groups: Any) -> None:
    is_number = isinstance(groups, int) and not isinstance(groups, bool) and groups > 0
    is_lists = isinstance(groups, list) and all(isinstance(each, (list, tuple)) for each in groups)
    if not is_number and not is_lists:
        raise ValueError("groups should be a non-negative integer or a list of list of tf.Variable.")


def reference(variable: Any) -> Any:
    """Returns the object by which a variable is the same: for one of Keras 3 that of TensorFlow inside."""
    inner = getattr(variable, "_value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def needs_collectives(process_set: ProcessSet) -> bool:
    """Returns whether ranks have to reduce together; not if this process is outside of the set, or alone in it.

    A graph of an elastic job has its collectives even when it is traced by one rank alone: it is not traced again when
    the job grows. Raises ValueError for a set that contains this process and is not registered, and before `init`.
    """
    if not process_set.included():
        return False
    members_of(process_set)
    return size_of(process_set) > 1 or (is_elastic() and not tf.executing_eagerly())


def reduce_gradients(gradients: Sequence[Any], variables: Sequence[Any] | None, options: Options) -> list[Any]:
    """Returns the gradients after their reduction. None stays None.

    variables -- what they are gradients of, for local variables and groups; may be None without these
    """
    results = list(gradients)
    if not needs_collectives(options.process_set):
        return [_dense(each) if options.sparse_as_dense else each for each in results]
    sources = list(variables) if variables is not None else [None] * len(results)
    reduced = []
    for index, (each, source) in enumerate(zip(results, sources)):
        if each is None:
            continue
        if source is not None and options.is_local(source):
            results[index] = _local(each, options)
            continue
        if options.sparse_as_dense:
            results[index] = _dense(each)
        reduced.append(index)
    if options.groups is not None:
        _reduce_groups(results, sources, reduced, options)
    else:
        _reduce_each(results, reduced, options)
    return results


def _dense(gradient: Any) -> Any:
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def _local(gradient: Any, options: Options) -> Any:
    if not options.scale_local_gradients:
        return gradient
    xla.refuse("the division of local gradients without scale_local_gradients=False")
    size = ops.ronde_size(process_set_id=mpi_ops.set_number(options.process_set))
    if isinstance(gradient, tf.IndexedSlices):
        values = gradient.values / tf.cast(size, gradient.values.dtype)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(size, gradient.dtype)


def _arguments(options: Options) -> dict[str, Any]:
    factor = options.gradient_predivide_factor
    return {
        "device_dense": options.device_dense,
        "device_sparse": options.device_sparse,
        "compression": options.compression,
        "op": options.op,
        "prescale_factor": 1.0 / factor,
        "postscale_factor": factor,
        "process_set": options.process_set,
    }


def _reduce_each(results: list[Any], indices: list[int], options: Options) -> None:
    """Reduces gradients, each by itself."""
    if tf.executing_eagerly():
        _reduce_eagerly(results, indices, options)
        return
    if xla.is_traced():
        indices = _reduce_compiled(results, indices, options)
    for index in indices:
        arguments = _arguments(options)
        if isinstance(results[index], tf.IndexedSlices):
            arguments = _of_slices(arguments, options)
        results[index] = mpi_ops.allreduce(results[index], name=f"{options.prefix}.{index}", **arguments)


def _reduce_compiled(results: list[Any], indices: list[int], options: Options) -> list[int]:
    """Reduces tensors as one group, as calls of a compiled function run in order. Returns the indices of the rest."""
    dense = [index for index in indices if not isinstance(results[index], tf.IndexedSlices)]
    name = f"{options.prefix}.compiled"
    reduced = mpi_ops.grouped_allreduce([results[index] for index in dense], name=name, **_arguments(options))
    for index, each in zip(dense, reduced):
        results[index] = each
    return [index for index in indices if index not in dense]


def _of_slices(arguments: dict[str, Any], options: Options) -> dict[str, Any]:
    # Dividing before and multiplying after changes nothing but the rounding.
    op = Sum if options.op == Sum else options.op
    return {**arguments, "op": op, "prescale_factor": 1.0, "postscale_factor": 1.0}


def _reduce_eagerly(results: list[Any], indices: list[int], options: Options) -> None:
    arguments = _arguments(options)
    dense = [index for index in indices if not isinstance(results[index], tf.IndexedSlices)]
    for index in indices:
        if index not in dense:
            results[index] = mpi_ops.allreduce(results[index], **_of_slices(arguments, options))
    with mpi_ops.device(options.device_dense):
        pairs = [options.compression.compress(results[index]) for index in dense]
        scales = (arguments["prescale_factor"], arguments["postscale_factor"])
        reduced = mpi_ops.allreduce_many([each for each, _ in pairs], options.op, scales, options.process_set)
        for index, each, (_, context) in zip(dense, reduced, pairs):
            results[index] = options.compression.decompress(each, context)


def _reduce_groups(results: list[Any], sources: list[Any], indices: list[int], options: Options) -> None:
    """Reduces gradients in groups, and those of no group by themselves."""
    slices = [index for index in indices if isinstance(results[index], tf.IndexedSlices)]
    dense = [index for index in indices if index not in slices]
    for number, group in enumerate(_groups(dense, sources, options.groups)):
        arguments = {**_arguments(options), "name": f"{options.prefix}.group.{number}"}
        reduced = mpi_ops.grouped_allreduce([results[index] for index in group], **arguments)
        for index, each in zip(group, reduced):
            results[index] = each
    _reduce_each(results, slices, options)


def _groups(indices: list[int], sources: list[Any], groups: Any) -> list[list[int]]:
    if isinstance(groups, int):
        count = min(groups, len(indices))
        bounds = [len(indices) * number // count for number in range(count + 1)] if count else [0]
        return [indices[first:end] for first, end in zip(bounds, bounds[1:])]
    found: list[list[int]] = []
    left = list(indices)
    for group in groups:
        members = [reference(each) for each in group]
        mine = [index for index in left if any(reference(sources[index]) is each for each in members)]
        left = [index for index in left if index not in mine]
        if mine:
            found.append(mine)
    return found + [[index] for index in left]
