"""Data-parallel training: gradients and parameters of all ranks."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy

from ronde.jax.collectives import broadcast_all, grouped_allreduce
from ronde.ops import Average

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ronde.process_set import ProcessSet


_HALVES = {"float64": "float32", "int64": "int32", "uint64": "uint32", "complex128": "complex64"}


class GradientTransformation(NamedTuple):
    """An optimizer as Optax defines them: `init(params)` and `update(updates, state, params)`."""

    init: Callable[..., Any]
    update: Callable[..., Any]


def allreduce_gradients(
    gradients: Any,
    op: int = Average,
    name: str | None = "gradients",
    *,
    codec: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Reduces a pytree of gradients over all ranks, as one operation.

    Leaves without values, which JAX returns for integer parameters, stay as they are. Arguments and errors are those of
    `grouped_allreduce`.
    """
    leaves, structure = jax.tree.flatten(gradients)
    chosen = [index for index, leaf in enumerate(leaves) if jnp.result_type(leaf) != jax.dtypes.float0]
    reduced = grouped_allreduce([leaves[index] for index in chosen], op, name, codec=codec, process_set=process_set)
    for index, leaf in zip(chosen, reduced):
        leaves[index] = leaf
    return jax.tree.unflatten(structure, leaves)


def value_and_grad(
    function: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    op: int = Average,
    name: str | None = "gradients",
    codec: str | None = None,
    process_set: ProcessSet | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """`jax.value_and_grad` whose gradients are reduced over all ranks. The value is this rank's own.

    options -- further arguments of `jax.value_and_grad`

    The other arguments are those of `jax.value_and_grad` and `allreduce_gradients`.
    """
    inner = jax.value_and_grad(function, argnums, has_aux, **options)

    @functools.wraps(function)
    def of_all_ranks(*arguments: Any, **keywords: Any) -> tuple[Any, Any]:
        value, gradients = inner(*arguments, **keywords)
        return value, allreduce_gradients(gradients, op, name, codec=codec, process_set=process_set)

    return of_all_ranks


def grad(function: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, **options: Any) -> Any:
    """`jax.grad` whose gradients are reduced over all ranks. Arguments are those of `value_and_grad`."""
    inner = value_and_grad(function, argnums, has_aux, **options)

    @functools.wraps(function)
    def of_all_ranks(*arguments: Any, **keywords: Any) -> Any:
        value, gradients = inner(*arguments, **keywords)
        return (gradients, value[1]) if has_aux else gradients

    return of_all_ranks


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    op: int = Average,
    name: str | None = "gradients",
    *,
    codec: str | None = None,
    process_set: ProcessSet | None = None,
) -> Any:
    """Returns an optimizer of Optax that reduces the gradients over all ranks, then does what the given one does.

    optimizer -- one of Optax, or any object with `init(params)` and `update(updates, state, params)`

    The state is the given optimizer's. The result works where Optax's optimizers do: in `optax.chain`, in
    `optax.MultiSteps` (which then reduces once for several steps) and in Flax's `TrainState`. The other arguments are
    those of `allreduce_gradients`.
    """

    optax = sys.modules.get("optax")
    # Optax passes further arguments of `update` to one of its own types alone.
    inner = optimizer if optax is None else optax.with_extra_args_support(optimizer)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> Any:
        reduced = allreduce_gradients(updates, op, name, codec=codec, process_set=process_set)
        return inner.update(reduced, state, params, **extra)

    kind = GradientTransformation if optax is None else optax.GradientTransformationExtraArgs
    return kind(optimizer.init, update)


def broadcast_parameters(
    parameters: Any, root_rank: int = 0, name: str | None = "parameters", *, process_set: ProcessSet | None = None
) -> Any:
    """Sends a pytree of rank `root_rank` to all ranks: parameters, an optimizer's state, keys of `jax.random`.

    parameters -- a pytree of arrays and numbers, of the same structure, types and shapes on all ranks

    Returns the pytree of the root. Numbers of Python stay such, and arrays of NumPy become those of JAX. Without
    `jax_enable_x64` JAX has no types of 64 bits; then NumPy's arrays of such types stay NumPy's, with all bits. In a
    compiled program, where they would be constants of the program, they become JAX's types of 32 bits. Arguments and
    errors are those of `broadcast`; it raises ValueError for a leaf that is neither an array nor a number.
    """
    leaves, structure = jax.tree.flatten(parameters)
    if not leaves:
        return parameters
    halves = [_halves_of(leaf) for leaf in leaves]
    sent = [_as_array(leaf, half) for leaf, half in zip(leaves, halves)]
    received = broadcast_all(sent, root_rank, name, process_set)
    given = [_as_given(leaf, array, half) for leaf, array, half in zip(leaves, received, halves)]
    return jax.tree.unflatten(structure, given)


def _halves_of(leaf: Any) -> str | None:
    """Returns the type as two elements of which each element of a leaf travels, if JAX has no type of its size."""
    if isinstance(leaf, jax.Array) or jax.config.jax_enable_x64:
        return None
    if isinstance(jnp.asarray(numpy.zeros(1, "int32")), jax.core.Tracer):  # a program is being traced
        return None
    return _HALVES.get(numpy.asarray(leaf).dtype.name)


def _as_array(leaf: Any, half: str | None) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf) if _is_key(leaf) else leaf
    if isinstance(leaf, (bool, int, float, complex, numpy.ndarray, numpy.generic)):
        if half is None:
            return jnp.asarray(leaf)
        array = numpy.asarray(leaf)
        return jnp.asarray(numpy.ascontiguousarray(array).reshape(-1).view(half).reshape(*array.shape, 2))
    raise ValueError(f"a leaf is a {type(leaf).__module__}.{type(leaf).__qualname__}; give arrays and numbers")


def _as_given(leaf: Any, array: Any, half: str | None) -> Any:
    if half is not None:
        known = numpy.asarray(leaf)
        array = numpy.array(array).reshape(-1).view(known.dtype).reshape(known.shape)
    if isinstance(leaf, jax.Array):
        return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else array
    if isinstance(leaf, (bool, int, float, complex)) and not isinstance(array, jax.core.Tracer):
        return type(leaf)(array.item())
    return array


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
